"""What is no HTTP, over raw sockets: an OpenAI-shaped error that repeats nothing, and a closed connection."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import pytest
import uvloop
from aiohttp import web

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ScriptedFleet
from tests.patience import PATIENCE_S
from transom.http_listener import HttpListener
from transom.messages import KVHandoff

GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
SECRET = b"hidden-canary"

MALFORMED = {
    "garbage": SECRET + b"\x00\xff\x01\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "wrong version": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "method of other characters": b"G\xc3\x84T /" + SECRET + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "space in a header's name": GET + b"X " + SECRET + b": 1\r\n\r\n",
    "control character in a header": GET + b"X: " + SECRET + b"\x00\r\n\r\n",
    "folded header": GET + b"X: a\r\n " + SECRET + b"\r\n\r\n",
    "no colon": GET + SECRET + b"\r\n\r\n",
    "lone line feeds in a header": GET + b"X: a\rY: " + SECRET + b"\r\n\r\n",
    "length that is no number": POST + b"Content-Length: " + SECRET + b"\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "two lengths": POST + LENGTH + b"Content-Length: 4\r\n\r\n" + BODY,
    "length and chunks": POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown transfer encoding": POST + b"Transfer-Encoding: " + SECRET + b"\r\n\r\n",
    "too many headers": GET + b"".join(b"X-%d: 1\r\n" % number for number in range(140)) + b"\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
}
TOO_LONG = {
    "path": b"GET /" + SECRET * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "header": GET + b"X: " + SECRET * 1000 + b"\r\n\r\n",
    "header's name": GET + SECRET * 1000 + b": 1\r\n\r\n",
    "never-ending line": b"GET /" + SECRET * 9000,
}


def only_server(raw: bytes) -> bytes:
    """Return what an answer says of the server: once, and no version."""
    (line,) = (one for one in raw.partition(b"\r\n\r\n")[0].split(b"\r\n") if one.startswith(b"Server:"))
    return line.removeprefix(b"Server: ")


async def exchange(fleet: ScriptedFleet, sent: bytes) -> bytes:
    """Send bytes; return all that comes until the gateway closes the connection."""
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(sent)
            return await reader.read()
    finally:
        writer.close()
        # What was sent and not read any more makes the gateway's side a reset.
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def only_answer(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert (
        "Content-Type: application/json; charset=utf-8" in lines or "Content-Type: application/json" in lines
    )
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(lines[0].split()[1]), error


@pytest.mark.parametrize("case", MALFORMED)
async def test_what_is_not_http_is_an_openai_error(
    fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    with caplog.at_level(logging.DEBUG):
        raw = await exchange(fleet, MALFORMED[case])
    status, error = only_answer(raw)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
    assert "not HTTP" in error["message"]
    assert only_server(raw) == b"transom"
    assert SECRET not in raw
    assert SECRET.decode() not in caplog.text
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("case", TOO_LONG)
async def test_a_line_of_the_head_has_a_limit_that_is_told(fleet: ScriptedFleet, case: str) -> None:
    raw = await exchange(fleet, TOO_LONG[case])
    status, error = only_answer(raw)
    assert (status, error["code"]) == (400, "invalid_request")
    assert "longer than 8190 bytes, the limit" in error["message"]
    assert SECRET not in raw


async def test_a_connection_ends_with_its_first_garbage(fleet: ScriptedFleet) -> None:
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        writer.write(GET + b"\r\n")
        assert (await reader.readuntil(b"}]}")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\x00\x01\r\n\r\n" + GET + b"\r\n")
        assert only_answer(await reader.read())[0] == 400
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n" + SECRET,
        b'5\r\n{"a"' + SECRET,
        b"-1\r\n\r\n",
        b"ffffffffffffffffff\r\n{",
        b"1\r\n{\r\n0\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(5000)),
    ],
)
async def test_a_body_of_broken_chunks_is_an_openai_error(fleet: ScriptedFleet, body: bytes) -> None:
    raw = await exchange(fleet, POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert SECRET not in raw
    assert only_answer(raw)[0] == 400
    assert fleet.stage.load()["buffered_bytes"] == 0


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere", b"/page/app.js"])
async def test_an_expectation_that_is_not_known_is_an_openai_error(fleet: ScriptedFleet, path: bytes) -> None:
    raw = await exchange(
        fleet, b"GET %s HTTP/1.1\r\nHost: x\r\nExpect: a-pony\r\nConnection: close\r\n\r\n" % path
    )
    if path == b"/v1/models":  # it has no body that could be held back
        assert raw.startswith(b"HTTP/1.1 200 ")
    else:
        assert only_answer(raw)[0] == 417


async def test_a_head_that_does_not_come_ends_the_connection(start_fleet: FleetFactory) -> None:
    """Whoever says nothing, or never comes to the end, does not hold a descriptor for long."""
    fleet = await start_fleet(head_timeout_s=0.3)
    for begun in (b"", b"GET / HT", GET):
        assert await exchange(fleet, begun) == b""
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(GET + b"\r\n")
    assert (await reader.readuntil(b"}]}")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"GET /v1/mod")  # a later request of the connection
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_no_answer_names_the_versions_of_what_serves_it(fleet: ScriptedFleet) -> None:
    streamed = BODY[:-1] + b', "stream": true}'
    for sent in (
        *(
            b"GET %s HTTP/1.1\r\n" % path
            for path in (b"/health", b"/metrics", b"/nowhere", b"/", b"/page/app.js")
        ),
        b"GET /health HTTP/1.1\r\nExpect: a-pony\r\n",
        b"OPTIONS /v1/models HTTP/1.1\r\n",
        POST.replace(b"Host: x\r\n", b"") + b"Content-Length: 1\r\n\r\n{",
        POST.replace(b"Host: x\r\n", b"") + LENGTH + b"Connection: close\r\n\r\n" + BODY,
        POST.replace(b"Host: x\r\n", b"")
        + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(streamed)
        + streamed,
    ):
        begin, _, rest = sent.partition(b"\r\n")
        raw = await exchange(fleet, begin + b"\r\nHost: x\r\nConnection: close\r\n" + rest + b"\r\n")
        assert only_server(raw) == b"transom", raw
        assert b"aiohttp" not in raw.lower().partition(b"\r\n\r\n")[0]


async def test_a_connection_that_waits_for_its_next_request_is_kept(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(head_timeout_s=0.2)
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        for pause_s in (0.5, 0):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"}]}")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(pause_s)  # longer than a head may take
    writer.close()
    await writer.wait_closed()


def test_a_head_that_came_while_the_process_stood_still_is_read() -> None:
    """uvloop, in which stages run, looks at its timers after each turn of reading, however long that took."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def main() -> bytes | BaseException:
        app = web.Application()
        app.router.add_get("/", answer)
        listener = HttpListener(app, head_timeout_s=0.1)
        await listener.start("127.0.0.1", 0)
        manager, loop = listener._runner.server, asyncio.get_running_loop()
        assert manager is not None
        with socket.create_connection(("127.0.0.1", int(listener.url.rsplit(":", 1)[1]))) as client:
            while not manager.connections:  # noqa: ASYNC110 - nothing tells of a connection
                await asyncio.sleep(0)
            here, there = socket.socketpair()

            def stand_still() -> None:
                loop.remove_reader(here)
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                time.sleep(0.3)

            loop.add_reader(here, stand_still)
            there.send(b"x")
            client.settimeout(PATIENCE_S)
            raw = (await asyncio.gather(asyncio.to_thread(client.recv, 65536), return_exceptions=True))[0]
            here.close()
            there.close()
        await listener.close()
        return raw

    raw = uvloop.run(main())
    assert isinstance(raw, bytes)
    assert raw.startswith(b"HTTP/1.1 200 ")


async def test_the_time_of_a_head_is_not_that_of_body_and_answer(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(head_timeout_s=0.2)
    fleet.script.hold = asyncio.Event()
    host, port = fleet.url.removeprefix("http://").split(":")
    clients = []
    head, half = POST + LENGTH + b"Connection: close\r\n\r\n", len(BODY) // 2
    for number in range(40):
        reader, writer = await asyncio.open_connection(host, int(port))
        clients.append((reader, writer))
        # Some of the bodies come while the gateway is about to begin with the request.
        writer.write(head)
        if number % 2:
            await asyncio.sleep(0)
        writer.write(BODY[:half])
    await asyncio.sleep(0.5)  # longer than a head may take
    for _, writer in clients:
        writer.write(BODY[half:])
    await fleet.decodes[0].wait_for(KVHandoff, len(clients))
    await asyncio.sleep(0.5)
    fleet.script.hold.set()
    async with asyncio.timeout(PATIENCE_S):
        for reader, writer in clients:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
