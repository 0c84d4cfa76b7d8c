"""A real encoder process over the transport: all modalities, company, failures, aborts, kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web

from tests.encoder.server.standstill import children, go_on, stopped_in, until_dropped, until_replaced
from tests.patience import PATIENCE_S
from transom.encoder.expand import Expander
from transom.encoder.media.image import decode_image
from transom.encoder.media.wire import ImageJob
from transom.encoder.models.config import ProcessorConfig
from transom.encoder.models.loader import load_vision
from transom.encoder.preprocess import FramePreprocessor
from transom.hub import resolve_model

pytestmark = pytest.mark.process

Make = Callable[..., bytes]
TOLERANCE = 2e-4  # of values around 1: what the order of additions in another batch may change


@pytest.fixture(scope="module")
def expander() -> Expander:
    return Expander.from_folder(resolve_model("mimo-nano"))


def embed_alone(data: bytes) -> np.ndarray:
    """The embedding of one picture, computed in this process without server, batch or worker."""
    folder = resolve_model("mimo-nano")
    cfg = ProcessorConfig.from_folder(folder)
    job = ImageJob(
        factor=cfg.factor, min_pixels=cfg.image_min_pixels, max_pixels=cfg.image_max_pixels,
        max_aspect_ratio=cfg.max_aspect_ratio, max_image_pixels=10**8, full_decode_pixels=10**8,
        max_tokens=10**6, background=(255, 255, 255), frame_index=0,
    )  # fmt: skip
    image = decode_image(memoryview(data), job)
    patches, grid = FramePreprocessor(cfg, torch.device("cpu"))(image.pixels[None].copy(), image.target)
    tower = load_vision(folder, torch.float32, "cpu")
    with torch.inference_mode():
        return np.asarray(tower(patches, [grid]).numpy())


async def test_a_picture_gives_the_towers_embedding(
    client: Any, expander: Expander, make_picture: Make
) -> None:
    data = make_picture(1)
    result = client.send("image-1", "image", data)
    await client.wait(result)
    assert result.error is None
    wanted = embed_alone(data)
    assert result.tokens == expander.image(len(wanted))
    np.testing.assert_allclose(result.embedding, wanted, atol=TOLERANCE)
    done = result.done
    assert (done.modality, done.media_tokens, done.audio_tokens) == ("image", len(wanted), 0)
    assert {"queue", "decode", "preprocess", "batch", "forward", "send", "total"} == set(done.timings_ms)


async def test_a_sound_takes_six_and_a_quarter_tokens_a_second(
    client: Any, expander: Expander, make_sound: Make
) -> None:
    result = client.send("audio-1", "audio", make_sound(4.0))
    await client.wait(result)
    frames = 1 + 4 * 24_000 // 240
    assert result.tokens == expander.audio(-(-frames // 16))
    assert result.done.media_tokens == len(result.embedding) == 26
    assert np.isfinite(result.embedding).all()


async def test_a_sound_longer_than_a_segment_comes_in_chunks(
    client: Any, expander: Expander, make_sound: Make
) -> None:
    result = client.send("audio-2", "audio", make_sound(70.0, rate=8000))
    await client.wait(result)
    assert result.chunks == 2
    assert result.tokens == expander.audio(375 + -(-1001 // 16))


async def test_a_clip_comes_as_units_with_their_times(
    client: Any, expander: Expander, make_clip: Make
) -> None:
    result = client.send("video-1", "video", make_clip(120))
    await client.wait(result)
    assert result.error is None
    rows = result.done.media_tokens // 6
    # 12 s at one frame a second, two frames a unit, spread over the whole clip.
    indices = np.linspace(0, 119, 12).round()[::2]
    assert result.tokens == expander.video([(index / 10, rows, 0) for index in indices])
    assert result.done.audio_tokens == 0


async def test_a_clip_gives_the_number_of_frames_that_is_asked_for(
    client: Any, expander: Expander, make_clip: Make
) -> None:
    """In pairs, and no more than there are; far from what the clip's length and rate would give."""
    data, short = make_clip(120), make_clip(9)
    asks = [(data, 2, 2), (data, 5, 4), (data, 16, 16), (data, 64, 64), (short, 16, 8)]
    results = [
        client.send(f"number-{place}", "video", clip, min_frames=number, max_frames=number)
        for place, (clip, number, _) in enumerate(asks)
    ]
    await client.wait(*results)
    for (clip, _, frames), result in zip(asks, results, strict=True):
        assert result.error is None
        last = (120 if clip is data else 9) - 1
        starts = np.linspace(0, last, frames).round()[::2] / 10
        rows = result.done.media_tokens // len(starts)
        assert result.tokens == expander.video([(start, rows, 0) for start in starts])


async def test_a_clips_sound_follows_its_units(client: Any, expander: Expander, make_clip: Make) -> None:
    data = make_clip(120, hertz=330.0)
    result, mute = (
        client.send("video-2", "video", data),
        client.send("video-3", "video", data, use_audio=False),
    )
    await client.wait(result, mute)
    starts = (np.linspace(0, 119, 12).round()[::2] / 10).tolist()
    total = result.done.audio_tokens
    assert total == pytest.approx(12 * 6.25, abs=2)
    cuts = [int(start * 6.25) for start in starts] + [total]
    rows = mute.done.media_tokens // 6
    units = [(start, rows, cuts[k + 1] - cuts[k]) for k, start in enumerate(starts)]
    assert result.tokens == expander.video(units)
    assert mute.tokens == expander.video([(start, rows, 0) for start in starts])
    assert result.done.content_key != mute.done.content_key


async def test_sizes_are_told_before_anything_is_encoded_and_kept_with_it(
    client: Any, make_picture: Make, make_clip: Make, make_sound: Make
) -> None:
    # In order: what is told first, and what stands at the end. AAC pads its end.
    items = {
        "image": (make_picture(900, 121, 93), {"pixels": 121 * 93}, {"pixels": 121 * 93}),
        "audio": (make_sound(3.0, hertz=333.0), {"audio_s": 3.0}, {"audio_s": 3.0}),
        "video": (make_clip(43, hertz=333.0), {"pixels": 160 * 96, "video_s": 4.3},
                  {"pixels": 160 * 96, "video_s": 4.3, "audio_s": 4.3}),
    }  # fmt: skip
    for kind, (data, first, last) in items.items():
        for turn in ("fresh", "kept"):
            result = client.send(f"{turn}-size-{kind}", kind, data)
            await client.wait(result)
            done = result.done
            assert done.cache_hit == (turn == "kept")
            assert {name: getattr(done.size, name) for name in last} == pytest.approx(last, abs=0.1)
            assert done.size.visual_tokens == (
                0 if kind == "audio" else done.media_tokens - done.audio_tokens
            )
            chunks, size = result.sizes[0]
            assert chunks == 0
            if turn == "kept":
                assert size == done.size
            assert {name: getattr(size, name) for name in first} == pytest.approx(first, abs=0.001)
            assert result.sizes[-1][1] == done.size


async def test_a_sound_that_claims_no_length_is_measured_as_it_is_decoded(
    client: Any, make_sound: Make
) -> None:
    piped = bytearray(make_sound(130.0, hertz=441.0, rate=8000))
    piped[4:8] = piped[40:44] = b"\xff\xff\xff\xff"  # as written to a pipe
    result = client.send("size-piped", "audio", bytes(piped))
    await client.wait(result)
    grown = [size.audio_s for _, size in result.sizes]
    assert grown == pytest.approx([60, 120, 130], abs=0.01)
    assert result.done.size.audio_s == grown[-1]


async def test_company_changes_nothing_but_rounding(client: Any, make_picture: Make) -> None:
    pictures = [make_picture(100 + seed, 90 + 40 * (seed % 4), 60 + 30 * (seed % 3)) for seed in range(16)]
    together = [client.send(f"batch-{n}", "image", data) for n, data in enumerate(pictures)]
    await client.wait(*together)
    for result, data in zip(together[::5], pictures[::5], strict=True):
        np.testing.assert_allclose(result.embedding, embed_alone(data), atol=TOLERANCE)


async def test_a_repeated_item_is_bit_identical_and_not_encoded_again(
    client: Any, make_picture: Make, make_clip: Make, make_sound: Make
) -> None:
    for kind, data in (("image", make_picture(7)), ("audio", make_sound(1.5)), ("video", make_clip(30))):
        first = client.send(f"first-{kind}", kind, data)
        await client.wait(first)
        before = (await client.load())["batches"]
        again = client.send(f"again-{kind}", kind, data)
        await client.wait(again)
        assert (first.done.cache_hit, again.done.cache_hit) == (False, True)
        assert first.embedding.tobytes() == again.embedding.tobytes()
        assert first.tokens == again.tokens
        assert (await client.load())["batches"] == before


async def test_options_are_part_of_the_key(client: Any, make_picture: Make) -> None:
    data = make_picture(8)
    results = [
        client.send("opt-0", "image", data),
        client.send("opt-1", "image", data, background=(0, 0, 0)),
        client.send("opt-2", "image", data, max_pixels=9216),
    ]
    await client.wait(*results)
    assert len({result.done.content_key for result in results}) == 3


async def test_equal_items_at_once_are_encoded_once(client: Any, make_clip: Make) -> None:
    data = make_clip(50, fps=9)
    before = await client.settled()
    results = [client.send(f"same-{n}", "video", data) for n in range(6)]
    await client.wait(*results)
    assert len({result.embedding.tobytes() for result in results}) == 1
    after = await client.load()
    assert after["cache_misses"] - before["cache_misses"] + after["cache_hits"] - before["cache_hits"] == 6
    assert after["batches"] - before["batches"] <= 4  # units of one clip, not of six


BAD = {
    "image": [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"x" * 50],
    "audio": [b"", b"no sound"],
    "video": [b"", b"no video", b"#EXTM3U\nfile:///etc/passwd"],
}


async def test_64_good_and_bad_items_at_once(
    client: Any, make_picture: Make, make_sound: Make, make_clip: Make
) -> None:
    good = {"image": make_picture(50), "audio": make_sound(1.0, 550.0), "video": make_clip(20)}
    alone = {kind: client.send(f"alone-{kind}", kind, data) for kind, data in good.items()}
    await client.wait(*alone.values())
    results = []
    for number in range(64):
        kind = ("image", "image", "audio", "video")[number % 4]
        if number % 3 == 0:
            data = BAD[kind][number % len(BAD[kind])]
            results.append((kind, False, client.send(f"mixed-{number}", kind, data)))
        else:
            # Different pictures, so that they are encoded beside the bad ones and not found in the cache.
            data = make_picture(1000 + number) if kind == "image" else good[kind]
            results.append((kind, True, client.send(f"mixed-{number}", kind, data)))
    await client.wait(*(result for _, _, result in results))
    for kind, is_good, result in results:
        if is_good:
            assert result.error is None
            assert result.complete
            assert kind == "image" or result.embedding.tobytes() == alone[kind].embedding.tobytes()
        else:
            assert result.error.status == 400
            assert result.error.code == "invalid_media"
            assert result.error.param == "messages[0].content[0]"
            assert result.chunks == 0
    load = await client.settled()
    assert load["media_bytes"] == 0
    assert load["decoder_crashes"] == 0


async def test_a_failed_item_ends_its_request_and_no_other(client: Any, make_picture: Make) -> None:
    bad = client.send("pair", "image", b"broken", item=1)
    other = client.send("other", "image", make_picture(60))
    await client.wait(bad, other)
    assert bad.error.param == "messages[0].content[1]"
    assert bad.failures == 1  # gateway and prefill are one address here
    assert other.error is None


async def test_an_abort_stops_the_stream_and_frees_everything(client: Any, make_clip: Make) -> None:
    data = await asyncio.to_thread(make_clip, 3000, fps=25)
    names: list[str] = []

    def send(number: int) -> Any:
        names.append(f"aborted-{number}")
        return client.send(names[-1], "video", data, fps=25.0, background=(number, 0, 0))

    result, workers = await stopped_in(client, send)
    client.abort(names[-1])
    await until_dropped(client)
    go_on(workers)
    load = await client.settled()
    chunks = result.chunks
    assert not result.complete
    assert result.done is None
    follow_up = client.send("after-abort", "video", make_clip(24))
    await client.wait(follow_up)
    assert follow_up.error is None
    assert result.chunks == chunks
    assert load["media_bytes"] == 0


async def test_an_abort_may_come_first(client: Any, make_picture: Make) -> None:
    client.abort("early")
    early = client.send("early", "image", make_picture(70))
    later = client.send("later", "image", make_picture(71))
    await client.wait(later)
    assert early.chunks == 0
    assert not early.ended.is_set()


async def test_aborts_right_behind_their_jobs_leave_nothing(client: Any, make_picture: Make) -> None:
    for number in range(200):
        client.send(f"brief-{number}", "image", make_picture(number % 5))
        client.abort(f"brief-{number}")
    after = client.send("after-the-brief", "image", make_picture(74))
    await client.wait(after)
    load = await client.settled()
    assert (load["items"], load["media_bytes"]) == (0, 0)


async def test_a_passed_deadline_is_told(client: Any, make_picture: Make) -> None:
    late = client.send("late", "image", make_picture(72), deadline_s=-1.0)
    await client.wait(late)
    assert (late.error.status, late.error.code) == (504, "deadline_exceeded")
    assert late.chunks == 0


async def test_decode_workers_killed_in_the_middle_cost_a_clip_nothing(
    client: Any, make_picture: Make, make_clip: Make
) -> None:
    data = make_clip(601, fps=25, hertz=300.0)
    result, before = await stopped_in(
        client, lambda n: client.send(f"killed-{n}", "video", data, fps=24.0, background=(n, 0, 0))
    )
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    await client.wait(result)
    assert result.error is None
    assert result.complete
    await until_replaced(client, before, lambda n: client.send(f"use-{n}", "image", make_picture(3000 + n)))
    again = client.send("unharmed", "video", data, fps=24.0, max_pixels=12288)  # another key, no kills
    await client.wait(again)
    assert again.tokens == result.tokens
    np.testing.assert_allclose(again.embedding, result.embedding, atol=TOLERANCE)


async def test_health_answers_while_busy(client: Any, make_clip: Make) -> None:
    results = [client.send(f"busy-{n}", "video", make_clip(200 + n)) for n in range(6)]
    for _ in range(10):
        await client.load()
    await client.wait(*results)
    assert all(result.error is None for result in results)


async def test_metrics_count_items_batches_and_failures(client: Any, make_picture: Make) -> None:
    good, bad = client.send("counted", "image", make_picture(80)), client.send("uncounted", "image", b"bad")
    await client.wait(good, bad)
    async with aiohttp.ClientSession() as http, http.get(f"{client.line['http']}/metrics") as response:
        text = await response.text()
    assert 'transom_encoder_items_total{modality="image",outcome="encoded"}' in text
    assert 'transom_encoder_items_total{modality="image",outcome="refused"}' in text
    assert 'transom_encoder_stage_seconds_count{modality="image",stage="decode"}' in text
    assert 'transom_encoder_batch_pieces_count{lane="vision"}' in text
    assert "transom_encoder_batches_total" in text


async def test_a_lost_prefill_frees_its_items_and_the_gateway_is_told(
    client: Any, new_client: Any, encoder: dict[str, Any], make_clip: Make, make_picture: Make
) -> None:
    """Also of embeddings that were sent, but may not have come; and only once of each loss."""
    async with new_client(encoder) as prefill:
        taker = {"reply_to": prefill.transport.address}
        own = client.send("own", "image", make_picture(40, 40))
        for request_id in ("sent", "orphan"):
            prefill.results[request_id, 0] = type(own)()
        sent = client.send("sent", "image", make_picture(40, 40), **taker)
        await client.wait(sent, own)
        orphan = client.send("orphan", "video", make_clip(3000, fps=24), fps=24.0, **taker)
        async with asyncio.timeout(PATIENCE_S):
            await prefill.results["orphan", 0].first.wait()
        assert (sent.failures, orphan.failures) == (0, 0)
    load = await client.settled()
    assert load["items"] == 0
    await client.wait(orphan)
    async with asyncio.timeout(PATIENCE_S):
        while not sent.failures:
            await client.load()  # as good as any message to wait for
    for result in (sent, orphan):
        assert (result.failures, result.error.status, result.error.code) == (1, 502, "stage_lost")
        assert result.error.message.startswith("the prefill worker of this request was lost")
    assert own.error is None


async def test_urls_overload_and_the_end_of_the_process(
    encoder_process: Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]],
    new_client: Any,
    make_picture: Make,
) -> None:
    process, line = await asyncio.to_thread(
        encoder_process, "--allow-private-addresses", "--fetch-ports", "0", "--max-queued-items", "4",
        "--embedding-cache-mb", "0", "--decode-workers", "1", "--fetch-connect-s", "600",
        "--fetch-read-s", "600", "--fetch-total-s", "600",
    )  # fmt: skip
    release = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await release.wait()
        if request.path == "/missing":
            return web.Response(status=404)
        return web.Response(body=make_picture(int(request.query.get("n", "0"))))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with new_client(line) as client:
        good = client.send("url", "image", url=f"{base}/a.png?n=3")
        missing = client.send("404", "image", url=f"{base}/missing")
        await client.wait(good, missing)
        assert good.error is None
        assert "fetch" in good.done.timings_ms
        assert "answered 404" in missing.error.message
        again = client.send("again", "image", url=f"{base}/a.png?n=3")
        await client.wait(again)
        assert not again.done.cache_hit  # no cache here
        np.testing.assert_allclose(again.embedding, good.embedding, atol=TOLERANCE)
        waiting = [client.send(f"slow-{n}", "image", url=f"{base}/slow?n={n}") for n in range(6)]
        await client.wait(*waiting[4:])
        for refused in waiting[4:]:
            assert (refused.error.status, refused.error.retry_after_s) == (429, 1.0)
        release.set()
        await client.wait(*waiting[:4])
        assert all(result.error is None for result in waiting[:4])
    await runner.cleanup()
    workers = children(line["pid"])
    assert len(workers) == 3  # a rank, a decode worker and a fetch worker
    process.terminate()
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert not set(map(str, workers)) & set(os.listdir("/proc"))
