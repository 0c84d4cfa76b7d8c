"""The playground as a person uses it, in a real browser."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.browser.chromium import Page, new_page
from tests.gateway.fake_workers import ScriptedFleet, scripted_fleet
from transom.errors import MediaError
from transom.messages import Abort, EncodeJob, PrefillJob
from transom.tokenizer import Tokenizer

pytestmark = pytest.mark.process


async def ask(page: Page, text: str) -> None:
    await page.js("document.querySelector('#prompt').focus()")
    await page.write(text)
    await page.press("Enter")


async def answered(page: Page, count: int = 1) -> None:
    await page.until(f"document.querySelectorAll('.answer[aria-busy=false]').length === {count}")


async def test_a_dropped_picture_is_sent_and_the_answer_streams(
    page: Page, fleet: ScriptedFleet, picture: Path
) -> None:
    fleet.script.answer = lambda job: "A green square, and nothing else."
    fleet.script.hold = asyncio.Event()
    await page.drop(picture)
    await page.until("document.querySelector('.attachment img')?.naturalWidth === 96")
    assert "shirt.png" in await page.text(".attachment")
    await ask(page, "What is this?")
    await page.until("document.querySelector('.answer .text').textContent.length > 0")
    assert await page.text(".answer .text") != "A green square, and nothing else."  # decode is held
    assert await page.js("document.querySelector('#stop').hidden") is False
    fleet.script.hold.set()
    await answered(page)
    assert await page.text(".answer .text") == "A green square, and nothing else."
    job = (await fleet.prefills[0].wait_for(PrefillJob))[0]
    assert "<image>What is this?" in fleet.prompt_text(job)
    sent = next(one for one in fleet.encoders[0].seen if isinstance(one.message, EncodeJob))
    assert bytes(sent.frames[0]) == await asyncio.to_thread(picture.read_bytes)


async def test_the_timeline_stands_beside_the_answer(page: Page, picture: Path) -> None:
    await page.drop(picture)
    await ask(page, "And this?")
    await answered(page)
    await page.until("document.querySelector('#timeline .figures')?.innerText.includes('in all')")
    shown = await page.text("#timeline")
    for word in ("Gateway", "Encode", "Prefill", "Decode", "Picture 1", "encoded", "cached", "encoder-0"):
        assert word in shown
    assert "first\u00a0after" in await page.text(".answer .foot")
    bars = await page.js("[...document.querySelectorAll('.bar')].map((bar) => bar.offsetWidth)")
    assert len(bars) >= 7
    assert min(bars) >= 2


async def test_escape_stops_an_answer_and_the_fleet_is_told(page: Page, fleet: ScriptedFleet) -> None:
    fleet.script.hold = asyncio.Event()
    await ask(page, "Tell me a long story")
    await page.until("document.querySelector('.answer .text').textContent.length > 0")
    await page.press("Escape")
    await answered(page)
    assert "stopped" in await page.text(".answer .foot")
    await fleet.decodes[0].wait_for(Abort)
    await page.until("document.querySelector('#timeline').innerText.includes('499')")
    fleet.script.hold.set()
    await ask(page, "Go on")
    await answered(page, 2)
    job = (await fleet.prefills[0].wait_for(PrefillJob, 2))[1]
    prompt = fleet.prompt_text(job)
    assert prompt.index("Tell me a long story") < prompt.index("Go on")


async def test_the_stop_button_stops(page: Page, fleet: ScriptedFleet) -> None:
    fleet.script.hold = asyncio.Event()
    await ask(page, "Count to a million")
    await page.until("document.querySelector('.answer .text').textContent.length > 0")
    await page.click("#stop")
    await answered(page)
    assert "stopped" in await page.text(".answer .foot")


async def test_an_error_says_what_and_where_and_gives_the_message_back(
    page: Page, fleet: ScriptedFleet, picture: Path
) -> None:
    where = "messages[0].content[0].image_url"
    fleet.script.encode_error = MediaError("the file is no picture", param=where).info()
    await page.drop(picture)
    await ask(page, "What is this?")
    await page.until("document.querySelector('[role=alert]')")
    shown = await page.text("[role=alert]")
    assert "Error 400" in shown
    assert "the file is no picture" in shown
    assert where in shown
    assert await page.js("document.querySelector('#prompt').value") == "What is this?"
    assert await page.js("document.querySelectorAll('.attachment').length") == 1
    fleet.script.encode_error = None
    await page.press("Enter")
    await answered(page)
    job = (await fleet.prefills[0].wait_for(PrefillJob, 2))[1]
    assert fleet.prompt_text(job).count("What is this?") == 1


async def test_a_file_of_another_kind_is_refused(page: Page, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    await page.drop(note)
    await page.until("document.querySelector('[role=alert]')")
    assert "note.txt" in await page.text("[role=alert]")
    assert await page.js("document.querySelector('#attachments').hidden") is True


async def test_a_long_answer_is_followed_but_never_pulls_back(page: Page, fleet: ScriptedFleet) -> None:
    fleet.script.answer = lambda job: "One line of a long answer.\n" * 40
    foot = "document.querySelector('.answer:last-child .foot').getBoundingClientRect().bottom"
    edge = "document.querySelector('#composer').getBoundingClientRect().top"
    await ask(page, "At length")
    await answered(page)
    await page.until(f"scrollY > 0 && {foot} <= {edge} + 1")  # it follows with the next frame
    await page.js("scrollTo(0, 0)")
    fleet.prefills[0].load = {"running_requests": 1.0}  # whatever is drawn meanwhile
    await page.until("document.querySelector('#fleet').innerText.includes('1 running')")
    assert await page.js("scrollY") == 0


async def test_markup_of_the_model_stays_text(page: Page, fleet: ScriptedFleet) -> None:
    hostile = "<img src=x onerror=\"document.title='gone'\"><b>bold</b>"
    fleet.script.answer = lambda job: hostile
    await ask(page, "Write some HTML")
    await answered(page)
    assert await page.text(".answer .text") == hostile
    assert await page.js("document.querySelectorAll('.answer img, .answer b').length") == 0
    assert await page.js("document.title") == "transom playground"


async def test_the_fleet_is_shown_and_followed(page: Page, fleet: ScriptedFleet) -> None:
    fleet.prefills[0].load = {"full_used_slots": 25.0, "full_total_slots": 100.0, "running_requests": 2.0}
    await page.until("document.querySelector('#fleet').innerText.includes('25%')")
    assert "2 running" in await page.text("#fleet")
    fleet.prefills[0].load = {"waiting_requests": 3.0, "waiting_swa_pool": 2.0, "waiting_embeddings": 1.0}
    wait = "3 waiting (2 for the window pool, 1 for embeddings)"
    await page.until(f"document.querySelector('#fleet').innerText.includes('{wait}')")
    fleet.encoders[0].ready = False
    await page.until("document.querySelector('#readiness').innerText.includes('no ready encoder')")
    assert "not ready" in await page.text(".worker.lost")
    fleet.decodes[0].answer_pings = False
    await page.until("/told \\d+ s ago, 0 in work/.test(document.querySelector('#fleet').innerText)")


async def test_a_key_is_asked_for_and_kept_in_the_tab(
    chromium: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    async with scripted_fleet(tokenizer, api_keys_file=str(keys)) as fleet, new_page(chromium) as page:
        await page.open(fleet.url)
        await page.until("document.querySelector('#readiness').innerText.includes('needs an API key')")
        await page.click("#settings summary")
        await page.js("document.querySelector('#api-key').focus()")
        await page.write("open-sesame")
        await page.press("Enter")
        await page.until("!document.querySelector('#settings').open")
        await page.until("document.querySelector('#readiness.ready')")
        await page.open(fleet.url)
        await page.until("document.querySelector('#readiness.ready')")
        await ask(page, "Hello")
        await answered(page)
        await page.until("document.querySelector('#timeline .figures')")
        assert await page.js("localStorage.length") == 0
        assert page.problems == []


async def test_every_control_is_reached_by_tab(page: Page, picture: Path) -> None:
    await page.drop(picture)
    await page.until("document.querySelector('.attachment')")
    await page.js("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(7):
        reached.append(await page.js("document.activeElement.id || document.activeElement.className"))
        await page.press("Tab")
    assert reached == ["skip", "new-chat", "quiet", "remove", "prompt", "files", "send"]


async def test_shift_enter_breaks_the_line_and_nothing_is_sent(page: Page, fleet: ScriptedFleet) -> None:
    await page.js("document.querySelector('#prompt').focus()")
    await page.write("one")
    await page.press("Enter", shift=True)
    await page.write("two")
    assert await page.js("document.querySelector('#prompt').value") == "one\ntwo"
    assert await page.js("document.querySelectorAll('.turn').length") == 0


async def test_no_width_scrolls_sideways(page: Page, picture: Path) -> None:
    await page.drop(picture)
    await ask(page, "x" * 200)
    await answered(page)
    await page.until("document.querySelector('#timeline .figures')")
    for width in (320, 390, 768, 1280):
        await page.shape(width, 800, phone=width < 600)
        assert await page.js("document.documentElement.scrollWidth <= innerWidth"), width


# Of every element with text of its own: WCAG's ratio of its colour to the first opaque ground behind it.
_CONTRASTS = """
(() => {
  const rgb = (value) => value.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const found = rgb(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
      && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
    .map((node) => {
      const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
      return [node.textContent.trim().slice(0, 30), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
})()
"""


async def test_dark_and_light_can_both_be_read(page: Page, picture: Path, fleet: ScriptedFleet) -> None:
    await page.drop(picture)
    await ask(page, "What is this?")
    await answered(page)
    await page.until("document.querySelector('#timeline .figures')")
    fleet.script.encode_error = MediaError("no picture").info()
    await page.drop(picture)
    await ask(page, "And this?")
    await page.until("document.querySelector('[role=alert]')")
    grounds = []
    for dark in (False, True):
        await page.shape(1280, 900, dark=dark)
        found = await page.js(_CONTRASTS)
        assert len(found) > 20
        assert [one for one in found if one[1] < 4.5] == []
        grounds.append(await page.js("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
