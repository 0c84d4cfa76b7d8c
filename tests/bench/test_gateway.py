"""`transom bench gateway`: how answers are timed, and a short run with real processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from transom.bench import gateway
from transom.bench.added_latency import Contestant, Figures, Load, run_rounds
from transom.bench.processes import Child
from transom.bench.wire_client import Answer, Connection, post
from transom.cli import main
from transom.errors import ConfigError, UnavailableError

EVENTS = [b'data: {"n":1}', b'data: {"n":2}', b"data: [DONE]"]


def raw_stream() -> bytes:
    """Three events in chunks that don't respect their borders."""
    body = b"".join(event + b"\n\n" for event in EVENTS)
    pieces = [body[:5], body[5:20], body[20:]]
    chunks = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def test_events_have_the_time_of_their_last_byte() -> None:
    raw = raw_stream()
    for cut in range(1, len(raw)):
        events = Answer(0, [(1, raw[:cut]), (2, raw[cut:])]).events()
        assert [event for _, event in events] == EVENTS
        for came_ns, event in events:
            complete = raw.index(event[-6:]) + 8 <= cut  # with its empty line
            assert came_ns == (1 if complete else 2), (cut, event)


class _Transport:
    def write(self, data: bytes) -> None: ...


@pytest.mark.parametrize(
    "raw",
    [raw_stream(), b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world"],
    ids=["chunked", "length"],
)
async def test_an_answer_is_whole_with_its_last_byte_and_not_before(raw: bytes) -> None:
    for cut in range(1, len(raw)):
        connection = Connection()
        connection.connection_made(_Transport())  # type: ignore[arg-type]
        task = asyncio.create_task(connection.ask(post("http://x", "/", {})))
        await asyncio.sleep(0)
        connection.data_received(raw[:cut])
        await asyncio.sleep(0)
        assert not task.done()
        connection.data_received(raw[cut:])
        status, _, body, _ = (await task).read()
        assert status == 200
        assert body in (b"hello world", b"".join(event + b"\n\n" for event in EVENTS))


def arguments(**changes: Any) -> argparse.Namespace:
    given = {
        "rounds": 1, "requests": 10, "load_requests": 10, "concurrency": 2, "tokens": 4, "step_ms": 1.0,
        "sglang_router_python": "", "out": "", "json": True,
    }  # fmt: skip
    return argparse.Namespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"rounds": 0}, "--rounds 0"), ({"tokens": 1}, "--tokens 1"), ({"step_ms": 0.0}, "--step-ms 0.0")],
)
def test_senseless_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gateway.run(arguments(**changes))


@pytest.mark.process
def test_a_short_run_has_a_row_for_every_contestant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    flags = [
        "--rounds",
        "1",
        "--requests",
        "10",
        "--load-requests",
        "20",
        "--concurrency",
        "2",
        "--tokens",
        "4",
    ]
    python = ["--sglang-router-python", sys.executable]  # which has no such package
    assert main(["bench", "gateway", *flags, *python, "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = {(row["contestant"], row["mode"]): row for row in shown["rows"]}
    names = ("no proxy", "aiohttp proxy", "transom gateway", "sglang-router")
    assert list(rows) == [(name, mode) for name in names for mode in ("whole", "stream")]
    for (name, mode), row in rows.items():
        if name == "sglang-router":
            assert row["skipped"] == f"{sys.executable} has no sglang-router"
            assert row["added_p50_us"] is None
            continue
        assert row["skipped"] is None
        assert 0 < row["added_p50_us"] <= row["added_p99_us"]
        assert (row["token_p50_us"] is not None) == (mode == "stream")
    assert [json.loads(line)["contestant"] for line in out.read_text().splitlines()] == [
        name for name in names for _ in range(2)
    ]


@pytest.mark.process
def test_what_fails_in_a_round_ends_the_run(tmp_path: Path) -> None:
    """With a connection left open uvloop would wait for it for ever."""

    def fail(name: str, mode: str, figures: Figures) -> None:
        assert figures["requests_per_s"] > 0  # however little time the requests took
        raise UnavailableError(f"{name}, {mode}")

    load = Load(rounds=1, requests=10, load_requests=1, concurrency=1, tokens=2, step_s=0.001)
    with (
        (tmp_path / "log").open("w+b") as log,
        Child([sys.executable, "-m", "transom.bench.mock_fleet"], log=log) as mock,
    ):
        url = mock.line["http"]
        with pytest.raises(UnavailableError, match="no proxy, whole"):
            uvloop.run(run_rounds(load, url, [Contestant("no proxy", url, "mock")], fail))
