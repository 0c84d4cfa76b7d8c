"""`transom bench encoder`: what it sends, when it sends it, what it counts; against real processes too."""

from __future__ import annotations

import asyncio
import io
import json
import random
import tarfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.etree import ElementTree

import aiohttp
import av
import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from transom.bench import encoder
from transom.bench.encoder_load import Load, batch_histogram, draw_items, drive, summarise
from transom.bench.encoder_media import Item, ItemMaker, MediaHost, PictureBank, TokenSizes, read_servegen
from transom.bench.encoder_plot import plot_run
from transom.bench.encoder_targets import ChatTarget, Outcome, Target, Usage, WireTarget
from transom.commands.base import Parser
from transom.errors import ConfigError, MediaError, UnavailableError


def bench_args(*flags: str) -> Namespace:
    parser = Parser()
    encoder.add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    parsed: Namespace = parser.parse_args(flags)
    return parsed


def servegen(path: Path, clients: dict[str, tuple[dict[str, Any], str]]) -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for name, (tables, trace) in clients.items():
            for suffix, text in (("dataset.json", json.dumps(tables)), ("trace.csv", trace)):
                info = tarfile.TarInfo(f"servegen/data/multimodal/mm-image/{name}-{suffix}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    return path


def test_servegen_sizes_are_weighted_by_the_clients_rates(tmp_path: Path) -> None:
    path = servegen(
        tmp_path / "data.tar.xz",
        {
            "chunk-0": (
                {"0": {"image_tokens": "{100: 1.0}"}, "600": {"image_tokens": "{200: 0.5, 0: 0.5}"}},
                "0,1.0,0,Gamma,1,1\n600,4.0,0,Gamma,1,1\n1200,2.0,0,Gamma,1,1\n",
            ),
            "chunk-1": ({"0": {"image_tokens": "{300: 1.0}"}}, "0,2.0,0,Gamma,1,1\n"),
        },
    )
    sizes, rng = read_servegen(path), random.Random(1)
    counts = Counter(sizes.draw(rng) for _ in range(12_000))
    # 1 of 100 tokens, (4 + 2) / 2 of 200 tokens, 2 of 300 tokens; an image of no tokens is none.
    assert set(counts) == {100, 200, 300}
    assert {k: pytest.approx(v, rel=0.06) for k, v in counts.items()} == {100: 2000, 200: 6000, 300: 4000}
    (tmp_path / "bad").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="not a readable ServeGen archive"):
        read_servegen(tmp_path / "bad")
    with pytest.raises(ConfigError, match="no image has a token"):
        read_servegen(servegen(tmp_path / "empty", {}))


def pixels(item: Item) -> Any:
    if item.kind == "image":
        return np.asarray(Image.open(io.BytesIO(item.data)).convert("RGB"))
    with av.open(io.BytesIO(item.data)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(**{item.kind: 0})], axis=-1)


def test_items_differ_in_their_bytes_alone_and_all_decode() -> None:
    bank = PictureBank(sizes=TokenSizes({20: 1.0, 60: 2.0}), count=30, seed=3)
    maker = ItemMaker({"image": 8, "audio": 1, "video": 1}, bank, seed=5)
    items = [maker.make() for _ in range(120)]
    assert len({item.name for item in items}) == len({item.data for item in items}) == 120
    looks: dict[str, set[bytes]] = {}
    for item in items:
        values = pixels(item)
        assert len(values)
        looks.setdefault(item.mime, set()).add(values.tobytes())
        if item.kind == "image":
            assert f"{values.shape[1]}x{values.shape[0]}" == item.label
    assert set(looks) == {"image/jpeg", "image/png", "image/webp", "audio/wav", "video/mp4"}
    # 30 pictures, 4 sounds, 3 clips; the rest is said by a comment.
    assert sum(len(found) for found in looks.values()) <= 37
    again = ItemMaker({"image": 8, "audio": 1, "video": 1}, bank, seed=5)
    assert [again.make() for _ in range(120)] == items


def test_fresh_pictures_share_no_pixels() -> None:
    maker = ItemMaker({"image": 1}, PictureBank(fixed=(64, 48), count=2, fresh=True))
    seen = {pixels(maker.make()).tobytes() for _ in range(30)}
    assert len(seen) == 30


def test_pictures_follow_the_tokens_and_the_scale() -> None:
    areas = []
    for scale in (1.0, 0.5):
        bank = PictureBank(sizes=TokenSizes({100: 1.0}), count=12, scale=scale)
        maker = ItemMaker({"image": 1}, bank)
        sides = [maker.make().label.split("x") for _ in range(20)]
        areas.append([int(width) * int(height) for width, height in sides])
    assert all(area == pytest.approx(100 * 28 * 28, rel=0.02) for area in areas[0])
    assert all(area == pytest.approx(25 * 28 * 28, rel=0.03) for area in areas[1])


def test_repeats_take_their_share_and_nothing_else() -> None:
    bank = PictureBank(fixed=(32, 32), count=1)
    items = draw_items(ItemMaker({"image": 1}, bank), 2000, 0.3, 7)
    assert len({item.name for item in items}) == pytest.approx(1400, rel=0.05)
    assert len({i.name for i in draw_items(ItemMaker({"image": 1}, bank), 50, 0.0, 7)}) == 50


class Paced(Target):
    """Takes items one at a time, `pace_s` each."""

    def __init__(self, pace_s: float = 0.0) -> None:
        self._pace_s = pace_s
        self._one = asyncio.Lock()
        self.inside = self.most = 0
        self.names: list[str] = []

    async def __aenter__(self) -> Paced:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def encode(self, item: Item, url: str | None, timeout_s: float) -> Outcome:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.names.append(item.name)
        try:
            async with self._one:
                await asyncio.sleep(self._pace_s)
        finally:
            self.inside -= 1
        if item.name.endswith(".3"):
            raise MediaError("no such picture")
        return Outcome(rows=2, first_s=self._pace_s, cache_hit=False, timings_ms={"encode": 5.0})


def small_items(count: int) -> list[Item]:
    return draw_items(ItemMaker({"image": 1}, PictureBank(fixed=(16, 16), count=1)), count, 0.0, 0)


async def test_a_closed_loop_keeps_its_concurrency_and_counts_failures() -> None:
    target, items, ticks = Paced(0.001), small_items(20), []
    rows, wall_s = await drive(target, items, Load(None, 4), None, lambda: ticks.append(1))
    assert target.most == 4
    assert [row["number"] for row in rows] == list(range(20))
    assert sorted(target.names) == sorted(item.name for item in items)
    assert len(ticks) == 20
    summary = summarise(rows, wall_s, None, None)
    assert (summary["items"], summary["failed"], summary["errors"]) == (20, 1, ["no such picture"])
    assert summary["stage_ms"] == {"encode": 5.0}
    assert summary["cache_hits"] == 0
    assert summary["items_per_s"] == pytest.approx(19 / wall_s, rel=0.01)
    assert summary["forward_share"] is None


async def test_an_open_loop_counts_the_wait_behind_slow_items() -> None:
    target = Paced(0.02)
    rows, wall_s = await drive(target, small_items(12), Load(1000.0, seed=1), None)
    # A thousand a second into fifty a second: nothing is held back, and the last waits for all before it.
    assert target.most > 8
    latencies = [row["latency_ms"] for row in rows]
    assert latencies[-1] > 10 * 20
    assert latencies[-1] - latencies[0] > 8 * 20
    # From the first arrival to the last answer, and nothing more.
    assert rows[-1]["at_s"] < 1
    assert wall_s >= latencies[-1] / 1000


async def test_open_loop_arrivals_are_the_seeds() -> None:
    starts = []
    for seed in (1, 1, 2):
        rows, _ = await drive(Paced(), small_items(30), Load(2000.0, seed=seed), None)
        starts.append([row["at_s"] for row in rows])
    assert starts[0] == starts[1] != starts[2]
    assert starts[0][-1] / 29 == pytest.approx(1 / 2000, rel=0.5)


def test_the_batch_histogram_is_what_came_between() -> None:
    inf = float("inf")
    before, after = {1.0: 2.0, 2.0: 5.0, inf: 5.0}, {1.0: 3.0, 2.0: 10.0, inf: 12.0}
    assert batch_histogram(before, after) == {"1": 1, "2": 4, "more": 2}
    summary = summarise([], 2.0, Usage(1.0, 0.5, before), Usage(3.0, 1.5, after))
    assert summary["forward_share"] == 0.5
    assert summary["cpu_ms_per_item"] == 2000.0
    assert summary["latency_ms"]["p90"] is None


async def test_a_chat_server_gets_one_item_a_request() -> None:
    bodies: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        if len(bodies) == 2:
            return web.json_response({"error": {"message": "full"}}, status=429)
        return web.json_response({"choices": []})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "other"}]})

    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", models),
            web.post("/v1/chat/completions", chat),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with MediaHost() as host, ChatTarget(url) as target:
            items = small_items(2)
            rows, _ = await drive(target, items, Load(None, 1), host)
            async with aiohttp.ClientSession() as session:
                link = bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
                async with session.get(link) as response:
                    assert await response.read() == items[0].data
                async with session.get(link.rsplit("/", 1)[0] + "/9.9") as response:
                    assert response.status == 404
        assert [row["error"] for row in rows] == [None, "HTTP 429: " + '{"error": {"message": "full"}}']
        assert bodies[0]["model"] == "other"
        assert bodies[0]["max_tokens"] == 1
    finally:
        await runner.cleanup()
    with pytest.raises(UnavailableError, match="no model is served"):
        async with ChatTarget(url):
            pass


async def test_an_inbox_where_no_encoder_is_says_so() -> None:
    with pytest.raises(UnavailableError, match=r"tcp://127\.0\.0\.1:1"):
        async with WireTarget("tcp://127.0.0.1:1"):
            pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mix", "smell=1"), "--mix 'smell=1'"),
        (("--mix", "image=0"), "--mix 'image=0'"),
        (("--qps", "0"), "--qps 0.0"),
        (("--items", "0"), "--items 0"),
        (("--repeat", "1"), "--repeat 1.0"),
        (("--plot", "x.gif"), "--plot x.gif"),
        (("--flag", "threads"), "--flag 'threads'"),
        (("--url", "tcp://a:1", "--flag", "threads=1"), "--flag is for an own encoder"),
        (("--compare", "--url", "tcp://a:1"), "--url is not for it"),
        (("--compare", "--mix", "video=1"), "image and audio only"),
        (("--image", "0x4"), "--image '0x4'"),
    ],
)
def test_wrong_flags_are_named(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder.run(bench_args(*flags))


@pytest.mark.process
def test_a_run_against_its_own_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "rows.jsonl", tmp_path / "run.svg"
    flags = ["--items", "14", "--concurrency", "4", "--mix", "image=2,audio=1,video=1", "--scale", "0.25"]
    flags += ["--repeat", "0.3", "--seed", "6", "--warmup", "2", "--flag", "threads=1"]
    assert encoder.run(bench_args(*flags, "--out", str(out), "--plot", str(plot), "--json")) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert summary["items"] == len(rows) == 14
    assert summary["failed"] == 0
    assert {row["kind"] for row in rows} == {"image", "audio", "video"}
    assert all(row["rows"] > 0 and row["latency_ms"] >= row["first_ms"] > 0 for row in rows)
    repeated = 14 - len(set(draw_names(14, 0.3, 6)))
    assert repeated
    # A repeat that meets the first of its kind under way joins it and is no hit of the cache.
    assert 0 <= summary["cache_hits"] <= repeated
    assert sum(summary["batch_pieces"].values()) > 0
    assert 0 < summary["forward_share"] < 1
    assert summary["cpu_ms_per_item"] > 0
    assert {"decode", "preprocess", "forward", "total"} <= set(summary["stage_ms"])
    texts = [node.text for node in ElementTree.parse(plot).iter() if node.text and node.text.strip()]
    assert "forwards by pictures in them" in texts


def draw_names(count: int, repeat: float, seed: int) -> list[str]:
    mix = {"image": 2.0, "audio": 1.0, "video": 1.0}
    bank = PictureBank(scale=0.25, seed=seed)
    return [item.name for item in draw_items(ItemMaker(mix, bank, seed=seed), count, repeat, seed)]


def test_a_plot_without_batches_or_successes_is_still_a_picture(tmp_path: Path) -> None:
    row = {"number": 0, "kind": "image", "error": "gone", "at_s": 0.0, "latency_ms": 3.0}
    plot_run(tmp_path / "run.png", [row], {"batch_pieces": None})
    with Image.open(tmp_path / "run.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 16) or ()}
    assert (0xD6, 0x27, 0x28) in colours
