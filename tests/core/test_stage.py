"""The frame of a stage process: readiness line, probes, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.patience import PATIENCE_S
from transom.messages import Abort, Ping, Pong
from transom.transport import Transport

pytestmark = pytest.mark.process


@contextlib.asynccontextmanager
async def running(command: tuple[str, ...], *flags: str) -> AsyncIterator[tuple[Process, dict[str, Any]]]:
    """A stage process and its readiness line."""
    process = await asyncio.create_subprocess_exec(*command, *flags, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout is not None
        yield process, json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: Process) -> tuple[int, str, str]:
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_readiness_line_is_all_of_stdout(tiny_stage: tuple[str, ...]) -> None:
    async with running(tiny_stage) as (process, line):
        assert line["event"] == "ready"
        assert line["stage"] == "tiny"
        assert line["pid"] == process.pid
        assert line["inbox"].startswith("tcp://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        code, out, err = await ended(process)
    assert (code, out) == (0, "")
    assert "closed" in err


async def test_probes_and_ping_tell_of_the_stage(tiny_stage: tuple[str, ...], transport: Transport) -> None:
    async with running(tiny_stage) as (_, line), aiohttp.ClientSession() as http:
        async with http.get(f"{line['http']}/ready") as response:
            assert (response.status, await response.json()) == (200, {"ready": True, "reason": None})
        async with http.get(f"{line['http']}/health") as response:
            health = await response.json()
        assert health["status"] == "ok"
        assert health["load"] == {"work": 0.0}
        assert health["incarnation"] == line["incarnation"]
        transport.send(line["inbox"], Ping(reply_to=transport.address, nonce=7))
        received = await transport.recv()
        assert received.message == Pong(
            nonce=7, stage="tiny", incarnation=line["incarnation"], ready=True, load={"work": 0.0}
        )
        assert received.peer == line["inbox"]


async def test_a_stage_tells_how_often_its_connection_to_the_asker_broke(tiny_stage: tuple[str, ...]) -> None:
    """Nothing else tells the asker: its own connection, to the stage, stands all the time."""
    asker, between = Transport(), set[asyncio.StreamWriter]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", inbox_port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    target.write(data)
            target.close()

        between.add(writer)
        await asyncio.gather(copy(reader, inner[1]), copy(inner[0], writer))
        between.discard(writer)

    async def ask(inbox: str, breaks: int) -> None:
        """Ask until this is the answer; those that are given before the break is noticed get lost."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                asker.send(inbox, Ping(reply_to=asker.address, nonce=breaks))
                with contextlib.suppress(TimeoutError):
                    message = (await asyncio.wait_for(asker.recv(), 0.2)).message
                    assert isinstance(message, Pong)
                    if message.breaks == breaks:
                        return

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    inbox_port = int((await asker.start()).rpartition(":")[2])
    asker.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with running(tiny_stage) as (_, line):
            for breaks in range(3):
                await ask(line["inbox"], breaks)
                for writer in list(between):
                    writer.transport.abort()
    finally:
        server.close()
        await asker.close()


async def test_sigterm_drains_and_is_unready_meanwhile(
    tiny_stage: tuple[str, ...], transport: Transport
) -> None:
    flags = ("--work-s", "600", "--drain-timeout-s", "600")
    async with running(tiny_stage, *flags) as (process, line), aiohttp.ClientSession() as http:
        transport.send(line["inbox"], Abort(request_id="r", reason="work"))
        transport.send(line["inbox"], Abort(request_id="echo", reason="echo"))
        assert (await transport.recv()).message == Abort(request_id="echo", reason="echo")
        process.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:  # the signal needs a moment to arrive
            async with http.get(f"{line['http']}/ready") as response:
                status, body = response.status, await response.json()
        assert (status, body["reason"]) == (503, "draining")
        transport.send(line["inbox"], Abort(request_id="enough", reason="enough"))
        assert (await transport.recv()).message == Abort(request_id="r", reason="work")
        assert (await ended(process))[0] == 0


async def test_drain_is_bounded(tiny_stage: tuple[str, ...], transport: Transport) -> None:
    flags = ("--work-s", "600", "--drain-timeout-s", "0.2")
    async with running(tiny_stage, *flags) as (process, line):
        transport.send(line["inbox"], Abort(request_id="r", reason="work"))
        transport.send(line["inbox"], Abort(request_id="echo", reason="echo"))
        await transport.recv()
        process.send_signal(signal.SIGINT)
        code, _, err = await ended(process)
    assert code == 0
    assert "work left after 0.2 s of draining is dropped" in err


async def test_stdin_that_closes_stops_a_watching_stage(tiny_stage: tuple[str, ...]) -> None:
    async with running(tiny_stage, "--watch-stdin") as (process, _):
        assert process.stdin is not None
        process.stdin.write(b"what is written there does not matter")
        await process.stdin.drain()
        process.stdin.close()
        assert (await ended(process))[0] == 0


async def test_stdin_that_closes_does_not_stop_others(
    tiny_stage: tuple[str, ...], transport: Transport
) -> None:
    async with running(tiny_stage) as (process, line):
        assert process.stdin is not None
        process.stdin.close()
        transport.send(line["inbox"], Abort(request_id="echo", reason="echo"))
        assert (await transport.recv()).message == Abort(request_id="echo", reason="echo")
        assert process.returncode is None


@pytest.mark.parametrize("flag", ["--http-port", "--bind"])
async def test_taken_port_is_one_clear_line(tiny_stage: tuple[str, ...], flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = str(port) if flag == "--http-port" else f"tcp://127.0.0.1:{port}"
        process = await asyncio.create_subprocess_exec(*tiny_stage, flag, value, stdout=PIPE, stderr=PIPE)
        code, out, err = await ended(process)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line != "closed"]
    assert len(lines) == 1
    assert str(port) in lines[0]
    assert "ddress already in use" in lines[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--bind", "tcp://0.0.0.0:0"), "not loopback"),
        (("--bind", "nonsense"), "nonsense"),
        (("--refuse", "because"), "because"),
        (("--http-host", "no.such.host.invalid"), "no.such.host.invalid"),
    ],
)
async def test_bad_settings_are_one_clear_line(
    tiny_stage: tuple[str, ...], flags: tuple[str, ...], told: str
) -> None:
    process = await asyncio.create_subprocess_exec(*tiny_stage, *flags, stdout=PIPE, stderr=PIPE)
    code, out, err = await ended(process)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line != "closed"]
    assert len(lines) == 1
    assert told in lines[0]


async def test_foreign_bytes_leave_the_stage_alive(tiny_stage: tuple[str, ...], transport: Transport) -> None:
    async with running(tiny_stage) as (_, line):
        host, port = line["inbox"].removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(os.urandom(4096))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        transport.send(line["inbox"], Abort(request_id="echo", reason="echo"))
        assert (await transport.recv()).message == Abort(request_id="echo", reason="echo")
