"""The placement benchmark: what it counts adds up, and the ring beats polling where media repeat."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from types import TracebackType

import pytest

from transom.bench import placement, placement_live
from transom.bench.encoder_media import Item, ItemMaker, PictureBank
from transom.bench.encoder_targets import Outcome, Target, own_device
from transom.cli import main
from transom.errors import MediaError


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    placement.add_arguments(parser)
    return parser.parse_args(["--requests", "3000", "--items", "600", "--cached", "80", *flags])


@pytest.mark.parametrize("scenario", placement.SCENARIOS)
def test_the_ring_meets_more_caches_than_polling(scenario: str) -> None:
    args = arguments()
    rows = {policy: placement.simulate(args, scenario, policy) for policy in placement.POLICIES}
    for row in rows.values():
        assert row["encoded"] == pytest.approx((1 - row["hit_rate"]) * 3000, abs=0.5)
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
    bounded = rows["ring, bound 1.25"]
    assert bounded["hit_rate"] > 1.15 * rows["polling"]["hit_rate"]
    assert bounded["hit_rate"] <= rows["ring"]["hit_rate"] + 0.01
    if scenario == "one hot item":
        assert bounded["busiest_to_mean"] <= rows["ring"]["busiest_to_mean"]


def test_with_room_for_everything_each_item_is_encoded_once_by_its_owner() -> None:
    args = arguments("--items", "50", "--cached", "50", "--utilisation", "0.01")
    assert placement.simulate(args, "repeated media", "ring")["encoded"] == 50
    assert placement.simulate(args, "repeated media", "ring, bound 1.25")["encoded"] == 50
    assert placement.simulate(args, "repeated media", "polling")["encoded"] > 150


def test_rows_are_written_and_bad_settings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    flags = ["--requests", "200", "--items", "20", "--cached", "5", "--out", str(output)]
    assert main(["bench", "placement", *flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == len(summary["rows"]) == len(placement.SCENARIOS) * len(placement.POLICIES)
    assert all(row["benchmark"] == "placement" and row["simulated"] for row in rows)
    moved = summary["moved_keys"]
    assert moved["ring, one joins"] < 0.3 < moved["modulo, one joins"]
    assert main(["bench", "placement", "--encoders", "1"]) == 2
    assert "--encoders 1" in capsys.readouterr().err
    assert main(["bench", "placement", "--live", "1"]) == 2
    assert "--live 1" in capsys.readouterr().err
    assert main(["bench", "placement", "--live-cache-mb", "0"]) == 2
    assert "--live-cache-mb 0" in capsys.readouterr().err


class Gated(Target):
    """Holds items until `gate` is set; counts what it got."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate
        self.names: list[str] = []

    async def __aenter__(self) -> Gated:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def encode(self, item: Item, url: str | None, timeout_s: float) -> Outcome:
        self.names.append(item.name)
        await self._gate.wait()
        if item.name.endswith(".1"):
            raise MediaError("no such picture")
        return Outcome()


def few_items(count: int) -> list[Item]:
    maker = ItemMaker({"image": 1}, PictureBank(fixed=(16, 16), count=1))
    return [maker.make() for _ in range(count)]


async def test_real_encoders_get_what_the_gateways_ring_would_give_them() -> None:
    gate = asyncio.Event()
    names = ["encoder-0", "encoder-1", "encoder-2"]
    encoders = {name: Gated(gate) for name in names}
    target = placement_live.PlacedTarget(placement.placer(placement_live.RING, names), encoders)
    hot, *others = few_items(40)
    spread = [asyncio.create_task(target.encode(hot, None, 1.0)) for _ in range(6)]
    await asyncio.sleep(0)
    # Bounded: nobody holds more than 1.25 times its share of what is in flight, or the two that are free.
    assert sum(len(one.names) for one in encoders.values()) == 6
    assert max(len(one.names) for one in encoders.values()) <= 3
    gate.set()
    assert all(
        isinstance(found, MediaError) for found in await asyncio.gather(*spread, return_exceptions=True)
    )
    for one in encoders.values():
        one.names.clear()
    # One at a time, each has an owner: what failed is in flight no more.
    for item in others * 3:
        await target.encode(item, None, 1.0)
    owners = {item.name: [name for name in names if item.name in encoders[name].names] for item in others}
    assert all(len(own) == 1 for own in owners.values())
    assert len(Counter(own[0] for own in owners.values())) == 3


async def test_polling_takes_turns_whatever_the_item() -> None:
    gate = asyncio.Event()
    gate.set()
    names = ["encoder-0", "encoder-1"]
    encoders = {name: Gated(gate) for name in names}
    target = placement_live.PlacedTarget(placement.placer(placement_live.POLLING, names), encoders)
    _, item = few_items(2)
    for _ in range(8):
        await target.encode(item, None, 1.0)
    assert [len(one.names) for one in encoders.values()] == [4, 4]


def test_what_is_drawn_is_skewed_and_the_seeds() -> None:
    items = few_items(50)
    drawn = placement_live.draw(items, 4000, 1.0, "1 0")
    assert (
        drawn == placement_live.draw(items, 4000, 1.0, "1 0") != placement_live.draw(items, 4000, 1.0, "1 1")
    )
    counts = Counter(item.name for item in drawn)
    assert counts[items[0].name] / counts[items[9].name] == pytest.approx(10, rel=0.5)
    even = Counter(item.name for item in placement_live.draw(items, 4000, 0.0, "1 0"))
    assert len(even) == 50
    assert max(even.values()) < 2 * min(even.values())


def test_rows_name_the_encoders_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device(["--device", "cpu"]) == ""
    assert own_device(["--device", "meta", "--threads", "1"]) == "meta"
    monkeypatch.setenv("TRANSOM_ENCODER_DEVICE", "meta")
    assert own_device([]) == "meta"


def test_ratios_are_those_of_rounds_whatever_else_the_machine_did() -> None:
    def row(policy: str, number: int, items_per_s: float) -> placement_live.Row:
        names = ("hit_rate", "cpu_ms_per_item", "busiest_to_mean")
        times = dict.fromkeys(("mean", "p90", "p99"), 1000 / items_per_s)
        same = dict.fromkeys(names, 0.5)
        return {"policy": policy, "round": number, "items_per_s": items_per_s, "latency_ms": times} | same

    # Twice as fast in every round, which no other order of the same rounds would show.
    paces = [(0, 10.0), (1, 10.0), (2, 40.0)]
    rows = [row(placement_live.POLLING, number, pace) for number, pace in paces]
    rows += [row(placement_live.RING, number, 2 * pace) for number, pace in reversed(paces)]
    found = placement_live.ratios(rows)
    assert (found["items_per_s"], found["p90_ms"], found["hit_rate"]) == (2.0, 0.5, 1.0)
