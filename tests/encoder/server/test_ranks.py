"""An encoder with several ranks: shares, deaths of every kind under load, and what they leave behind."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.encoder.server.standstill import children, crash, decoders, stopped_in, until_replaced
from tests.patience import PATIENCE_S
from transom.cli import main
from transom.messages import Join
from transom.transport import Transport

pytestmark = pytest.mark.process

Make = Callable[..., bytes]
Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]
TOLERANCE = 2e-4


def ranks(line: dict[str, Any]) -> list[int]:
    return children(line["pid"], "encoder.ranks.process")


def descriptors(line: dict[str, Any]) -> int:
    return len(os.listdir(f"/proc/{line['pid']}/fd"))


def mappings(line: dict[str, Any]) -> int:
    """How many memory files of media and embeddings an encoder has mapped."""
    return Path(f"/proc/{line['pid']}/maps").read_text().count("memfd:transom")


def arenas(scope: str) -> list[str]:
    """The embedding caches of a scope in shared memory."""
    return [name for name in os.listdir("/dev/shm") if scope in name]


def inodes(scope: str) -> list[int]:
    """Which memory those are: a name may have been removed and made anew."""
    return [os.stat(f"/dev/shm/{name}").st_ino for name in arenas(scope)]


async def metric(line: dict[str, Any], name: str) -> dict[str, float]:
    """The values of a metric by its label."""
    async with aiohttp.ClientSession() as http, http.get(f"{line['http']}/metrics") as response:
        text = await response.text()
    return {
        label: float(value)
        for label, value in re.findall(rf'^{name}\{{\w+="([^"]*)"\}} (\S+)$', text, re.MULTILINE)
    }


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds, which asks another process and so takes its time."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            pass


async def in_forward(client: Any, queued: int = 0) -> None:
    """Wait until the front has started a forward and `queued` patches wait behind it."""

    async def started() -> bool:
        load = await client.load()
        outstanding = await metric(client.line, "transom_encoder_rank_outstanding")
        return load["queued_patches"] == queued and max(outstanding.values()) > 0

    await until(started)


@pytest.fixture
async def duo(pair: dict[str, Any], new_client: Any) -> AsyncIterator[Any]:
    """A client of the encoder with two ranks."""
    async with new_client(pair) as client:
        await until(lambda: all_ready(client))
        yield client


async def all_ready(client: Any) -> bool:
    load = await client.load()
    return bool(load["ranks_ready"] == load["ranks"])


async def restarted(client: Any, count: int) -> bool:
    """Whether so many ranks have been replaced, which the front hears of later than who ended them."""
    load = await client.load()
    return bool(load["rank_restarts"] >= count and load["ranks_ready"] == load["ranks"])


def send_all(client: Any, name: str, pictures: list[bytes]) -> list[Any]:
    return [client.send(f"{name}-{n}", "image", data) for n, data in enumerate(pictures)]


async def test_both_ranks_take_their_share_and_agree(duo: Any, make_picture: Make) -> None:
    pictures = [make_picture(n, 300 + n, 200) for n in range(24)]
    before = await metric(duo.line, "transom_encoder_rank_pieces_total")
    first: list[Any] = []
    shares, rounds = [0.0, 0.0], 0
    # A rank that gets no time of the machine takes no share: more comes until both have had some.
    async with asyncio.timeout(PATIENCE_S):
        while rounds < 2 or min(shares) < 8:
            order = [*range(24)] if rounds % 2 == 0 else [*range(24)][::-1]
            sent = {n: duo.send(f"share-{rounds}-{n}", "image", pictures[n]) for n in order}
            await duo.wait(*sent.values())
            first = first or [sent[n] for n in range(24)]
            for n in range(24):
                assert sent[n].error is None
                np.testing.assert_allclose(first[n].embedding, sent[n].embedding, atol=TOLERANCE)
            rounds += 1
            after = await metric(duo.line, "transom_encoder_rank_pieces_total")
            shares = [after[rank] - before[rank] for rank in ("0", "1")]
            assert sum(shares) == 24 * rounds


async def test_an_item_that_several_wait_for_is_embedded_by_one_rank_once(
    duo: Any, make_picture: Make
) -> None:
    before = await metric(duo.line, "transom_encoder_rank_pieces_total")
    results = send_all(duo, "same", [make_picture(900, 640, 480)] * 12)
    await duo.wait(*results)
    assert len({result.embedding.tobytes() for result in results}) == 1
    after = await metric(duo.line, "transom_encoder_rank_pieces_total")
    assert sum(after.values()) - sum(before.values()) == 1


async def test_killed_ranks_cost_no_request_and_leave_nothing(duo: Any, make_picture: Make) -> None:
    pictures = [make_picture(100 + n, 200 + 8 * n, 180) for n in range(40)]
    await duo.wait(*send_all(duo, "warm", pictures[:4]))
    await duo.settled()
    before = descriptors(duo.line), mappings(duo.line)
    restarts = (await duo.load())["rank_restarts"]
    for turn in range(3):
        results = send_all(duo, f"kill-{turn}", pictures)
        async with asyncio.timeout(PATIENCE_S):
            await results[0].first.wait()
        os.kill(ranks(duo.line)[turn % 2], signal.SIGKILL)
        await duo.wait(*results)
        assert [result.error for result in results] == [None] * len(results)
        await until(partial(restarted, duo, restarts + turn + 1))
    load = await duo.settled()
    assert load["rank_restarts"] - restarts == 3
    assert load["quarantined_items"] == 0
    assert len(ranks(duo.line)) == 2

    async def as_before() -> bool:
        await duo.load()
        return descriptors(duo.line) <= before[0] and mappings(duo.line) <= before[1]

    await until(as_before)


async def test_all_ranks_and_decoders_killed_at_once(duo: Any, make_picture: Make) -> None:
    pictures = [make_picture(200 + n, 240, 180) for n in range(30)]
    before = await duo.load()
    results = send_all(duo, "storm", pictures)
    async with asyncio.timeout(PATIENCE_S):
        await results[0].first.wait()
    killed = decoders(duo.line)
    for pid in ranks(duo.line) + killed:
        os.kill(pid, signal.SIGKILL)
    await duo.wait(*results)
    # A decoder that had given a part of its item can't be tried again; all others came through.
    lost = [result for result in results if result.error is not None]
    assert len(lost) <= 2
    assert all("ended from outside" in result.error.message for result in lost)
    await until(partial(restarted, duo, before["rank_restarts"] + 2))
    load = await duo.settled()
    assert (load["items"], load["media_bytes"]) == (0, 0)
    await until_replaced(duo, killed, lambda n: duo.send(f"use-{n}", "image", make_picture(n)))
    assert len(decoders(duo.line)) == 2


async def test_a_decoder_that_segfaults_fails_its_item_alone(
    duo: Any, make_clip: Make, make_picture: Make
) -> None:
    data = await asyncio.to_thread(make_clip, 3000, fps=25)

    def film_of(number: int) -> Any:
        return duo.send(f"film-{number}", "video", data, fps=24.0, background=(number, 0, 0))

    def picture_of(which: int, number: int) -> Any:
        return duo.send(f"beside-{number}-{which}", "image", make_picture(250 + which))

    film, victims = await stopped_in(duo, film_of, *(partial(picture_of, which) for which in range(4)))
    await crash(victims)
    after = send_all(duo, "behind", [make_picture(260 + n) for n in range(8)])
    await duo.wait(film, *after)
    assert (film.error.status, film.error.code) == (400, "invalid_media")
    assert "crashed on this item (SIGSEGV)" in film.error.message
    assert [result.error for result in after] == [None] * 8
    assert (await duo.settled())["items"] == 0


async def test_a_lone_item_whose_rank_crashes_is_refused_and_not_tried_again(
    encoder_process: Start, new_client: Any, make_picture: Make
) -> None:
    _, line = await asyncio.to_thread(encoder_process, "--embedding-cache-mb", "0")
    async with new_client(line) as client:
        (rank,) = ranks(line)
        os.kill(rank, signal.SIGSTOP)
        culprit = client.send("culprit", "image", make_picture(300))
        await in_forward(client)
        os.kill(rank, signal.SIGSEGV)
        os.kill(rank, signal.SIGCONT)
        await client.wait(culprit)
        assert (culprit.error.status, culprit.error.code) == (400, "invalid_media")
        assert "crashed on this item (signal SIGSEGV)" in culprit.error.message
        again, other = (
            client.send("again", "image", make_picture(300)),
            client.send("other", "image", make_picture(301)),
        )
        await client.wait(again, other)
        assert "not tried again" in again.error.message
        assert other.error is None
        load = await client.load()
        assert (load["rank_restarts"], load["quarantined_items"], load["trials"]) == (1, 1, 0)

        # Several in one forward: nobody knows which it was, so each is tried alone, and all come through.
        (rank,) = ranks(line)
        os.kill(rank, signal.SIGSTOP)
        first = client.send("first", "image", make_picture(310))
        await in_forward(client)
        waiting = send_all(client, "waiting", [make_picture(311 + n) for n in range(5)])
        await until(lambda: queued(client))
        os.kill(rank, signal.SIGKILL)
        await client.wait(first, *waiting)
        assert [result.error for result in (first, *waiting)] == [None] * 6
        load = await client.settled()
        assert load["rank_restarts"] == 2
        assert 1 <= load["trials"] <= 3  # what was in work: one forward, two being prepared
        assert load["moved_pieces"] == 6
        assert load["quarantined_items"] == 1


async def queued(client: Any) -> bool:
    load = await client.load()
    return bool(load["queued_patches"] > 0 and load["items"] == 6 and load["decoders_busy"] == 0)


async def test_items_that_nobody_wants_are_never_embedded(
    encoder_process: Start, new_client: Any, make_picture: Make
) -> None:
    _, line = await asyncio.to_thread(encoder_process, "--embedding-cache-mb", "0", "--max-queued-items", "8")
    async with new_client(line) as client:
        (rank,) = ranks(line)
        os.kill(rank, signal.SIGSTOP)
        running = client.send("running", "image", make_picture(400))
        await in_forward(client)
        aborted = send_all(client, "aborted", [make_picture(410 + n) for n in range(4)])
        wanted = client.send("wanted", "image", make_picture(421))
        await until(lambda: queued(client))
        refused = send_all(client, "refused", [make_picture(430 + n) for n in range(6)])
        await client.wait(*refused[2:])
        for result in refused[2:]:
            assert (result.error.status, result.error.retry_after_s) == (429, 1.0)
        for number in range(4):
            client.abort(f"aborted-{number}")
        for number in range(2):
            client.abort(f"refused-{number}")

        async def only_two() -> bool:
            return bool((await client.load())["items"] == 2)

        await until(only_two)
        late = client.send("late", "image", make_picture(420), deadline_s=1.0)
        await client.wait(late)
        assert (late.error.status, late.error.code) == (504, "deadline_exceeded")
        os.kill(rank, signal.SIGCONT)
        await client.wait(running, wanted)
        assert running.error is None
        assert wanted.error is None
        load = await client.settled()
        assert load["media_bytes"] == 0
        assert not any(result.chunks for result in (*aborted, late))
        assert await metric(line, "transom_encoder_rank_pieces_total") == {"0": 2.0}


async def test_a_rank_that_hangs_is_replaced(
    encoder_process: Start, new_client: Any, make_picture: Make
) -> None:
    # Long enough for its successor on a slow machine.
    _, line = await asyncio.to_thread(encoder_process, "--rank-timeout-s", "8")
    async with new_client(line) as client:
        os.kill(ranks(line)[0], signal.SIGSTOP)
        stuck = client.send("stuck", "image", make_picture(500))
        await client.wait(stuck)
        assert "no answer for 8 s" in stuck.error.message
        after = client.send("after", "image", make_picture(501))
        await client.wait(after)
        assert after.error is None


@dataclasses.dataclass(frozen=True)
class Comeback:
    """What one encoder gave before it was killed, and the next one for the same picture."""

    kept: Any
    again: Any
    same_memory: bool


async def killed_and_started_again(encoder_process: Start, new_client: Any, make_picture: Make) -> Comeback:
    scope = uuid.uuid4().hex[:12]
    process, line = await asyncio.to_thread(encoder_process, "--ranks", "2", scope=scope)
    pids = ranks(line) + decoders(line)
    assert len(pids) == 4
    async with new_client(line) as client:
        kept = client.send("kept", "image", make_picture(600))
        await client.wait(kept)
        while not (await client.load())["cache_entries"]:
            pass  # it is kept after it was sent
        client.send("running", "image", make_picture(601))
        (memory,) = inodes(scope)
        assert "-mimo-nano-" in arenas(scope)[0]  # and not what its folder happens to be called
        process.kill()
        await asyncio.to_thread(process.wait)
    async with asyncio.timeout(PATIENCE_S):
        while set(map(str, pids)) & set(await asyncio.to_thread(os.listdir, "/proc")):
            pass
    process, line = await asyncio.to_thread(encoder_process, scope=scope)
    async with new_client(line) as client:
        again = client.send("again", "image", make_picture(600))
        await client.wait(again)
        same = inodes(scope) == [memory]
    process.terminate()
    assert await asyncio.to_thread(process.wait) == 0
    assert not arenas(scope)
    return Comeback(kept, again, same)


async def test_a_killed_server_takes_its_processes_along_and_its_memory_is_found_again(
    encoder_process: Start, new_client: Any, make_picture: Make
) -> None:
    for _ in range(3):
        found = await killed_and_started_again(encoder_process, new_client, make_picture)
        if found.same_memory:
            break  # else another encoder on this machine started meanwhile and removed it as an orphan
    assert found.again.done.cache_hit
    assert found.again.embedding.tobytes() == found.kept.embedding.tobytes()


async def test_200_requests_with_294_images_lose_none_and_health_answers(
    duo: Any, make_picture: Make
) -> None:
    requests = [(request, item) for request in range(200) for item in range(2 if request < 94 else 1)]
    assert len(requests) == 294
    results = [
        duo.send(f"many-{request}", "image", make_picture(2000 + 2 * request + item, 64, 64), item=item)
        for request, item in requests
    ]

    async def answered_s() -> float:
        begin = time.monotonic()
        await duo.load()
        return time.monotonic() - begin

    busy_s = []
    while not all(result.ended.is_set() for result in results):
        busy_s.append(await answered_s())
    assert all(result.error is None and result.complete for result in results)
    # On a machine that has others' work to do too, an encoder without work is not quick either.
    idle_s = [await answered_s() for _ in range(20)]
    assert statistics.median(busy_s) < max(0.1, 20 * statistics.median(idle_s))
    load = await duo.settled()
    assert (load["items"], load["media_bytes"], load["decoder_crashes"]) == (0, 0, load["decoder_crashes"])


async def test_the_timeline_shows_that_stages_overlap(
    duo: Any, make_picture: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [make_picture(700 + n, 640, 480, "JPEG") for n in range(24)]
    stages: dict[str, Any] = {}
    rounds = itertools.count()
    # While one batch was in a forward, pictures of later ones were decoded and prepared: unless the machine
    # let one wait for the other.
    async with asyncio.timeout(PATIENCE_S):
        while not all(stages.get(one, {}).get("during_forward_s") for one in ("decode", "preprocess")):
            results = send_all(duo, f"overlap-{next(rounds)}", pictures)
            await duo.wait(*results)
            assert await asyncio.to_thread(main, ["timeline", duo.line["http"], "--json"]) == 0
            stages = json.loads(capsys.readouterr().out)["stages"]
    output = tmp_path / "timeline.json"
    assert await asyncio.to_thread(main, ["timeline", duo.line["http"], "--output", str(output)]) == 0
    assert "during a forward" in capsys.readouterr().out
    events = json.loads(output.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"forward rank 0", "forward rank 1"} <= names
    spans = {name for name, _, _ in results[0].done.spans}
    assert spans == {"decode", "preprocess", "batch", "forward", "send"}


async def test_it_announces_itself_and_at_sigterm_says_goodbye_and_finishes(
    encoder_process: Start, new_client: Any, make_picture: Make
) -> None:
    gateway = Transport()
    address = await gateway.start()
    process, line = await asyncio.to_thread(
        encoder_process, "--ranks", "2", "--drain-timeout-s", "600", "--announce-to", address
    )
    async with asyncio.timeout(PATIENCE_S):
        assert (await gateway.recv()).message == Join(address=line["inbox"])
    pids = ranks(line) + decoders(line)
    async with new_client(line) as client:
        results = send_all(client, "drain", [make_picture(800 + n, 320, 240) for n in range(20)])
        async with asyncio.timeout(PATIENCE_S):
            await results[0].first.wait()
        process.terminate()
        await client.wait(*results)
        assert all(result.error is None for result in results)
        async with asyncio.timeout(PATIENCE_S):
            while not (goodbye := (await gateway.recv()).message).leaving:
                assert goodbye == Join(address=line["inbox"])
    assert goodbye == Join(address=line["inbox"], leaving=True)
    assert await asyncio.to_thread(process.wait) == 0
    assert not set(map(str, pids)) & set(os.listdir("/proc"))
    await gateway.close()
