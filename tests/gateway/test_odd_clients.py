"""Requests that are HTTP and JSON, but as no ordinary client sends them, over raw sockets."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ScriptedFleet
from tests.gateway.test_malformed_http import BODY, LENGTH, POST, exchange
from tests.patience import PATIENCE_S

CLOSE = b"Connection: close\r\n"


def answers(raw: bytes) -> list[tuple[int, Any]]:
    """Return status and JSON body of each answer."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        size = int(headers["content-length"])
        body, raw = rest[:size], rest[size:]
        found.append((int(lines[0].split()[1]), json.loads(body) if body else None))
    return found


@pytest.mark.parametrize(
    "path", [b"/\xff\xfe", b"/caf\xc3\xa9", b"/%ff%0d%0aX:1", b"//v1/models", b"/v1/./models"]
)
async def test_a_path_of_any_bytes_has_a_json_answer(fleet: ScriptedFleet, path: bytes) -> None:
    ((status, body),) = answers(
        await exchange(fleet, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
    )
    # What is no ASCII at all is no path either.
    assert (status, body["error"]["code"]) in ((404, "not_found"), (400, "invalid_request"))
    assert body["error"]["message"].isascii()
    assert body["error"]["message"].isprintable()


async def test_an_origin_of_any_bytes_breaks_nothing(start_fleet: FleetFactory) -> None:
    fleet = await start_fleet(cors_origins=("*",))
    raw = await exchange(fleet, POST + LENGTH + CLOSE + b"Origin: http://\xff.example\r\n\r\n" + BODY)
    assert raw.startswith(b"HTTP/1.1 200 ")
    assert b"access-control" not in raw.lower()
    raw = await exchange(fleet, POST + LENGTH + CLOSE + b"Origin: http://a.example\r\n\r\n" + BODY)
    assert b"Access-Control-Allow-Origin: http://a.example\r\n" in raw


async def test_an_offer_to_upgrade_is_declined_and_the_body_read(fleet: ScriptedFleet) -> None:
    """Clients that would rather speak HTTP/2 send it with their first request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    host, port = fleet.url.removeprefix("http://").split(":")
    for encoding, body in (
        (LENGTH, BODY),
        (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(POST + encoding + offer + b"\r\n" + body)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await writer.wait_closed()


async def test_a_body_encoded_twice_is_refused_however_that_is_said(fleet: ScriptedFleet) -> None:
    twice = b"Content-Encoding: gzip\r\nContent-Encoding: gzip\r\n"
    ((status, body),) = answers(await exchange(fleet, POST + LENGTH + CLOSE + twice + b"\r\n" + BODY))
    assert (status, body["error"]["code"]) == (415, "unsupported_media_type")


async def test_pipelined_requests_are_answered_in_order(fleet: ScriptedFleet) -> None:
    fleet.script.answer = lambda job: fleet.prompt_text(job).count("hi") * "hi"
    sent = b""
    for number in range(1, 6):
        body = json.dumps({"messages": [{"role": "user", "content": "hi" * number}]}).encode()
        sent += (
            POST + b"Content-Length: %d\r\n" % len(body) + (CLOSE if number == 5 else b"") + b"\r\n" + body
        )
    found = answers(await exchange(fleet, sent))
    assert [status for status, _ in found] == [200] * 5
    contents = [body["choices"][0]["message"]["content"] for _, body in found]
    assert [len(text) for text in contents] == sorted(len(text) for text in contents)
    assert len(set(contents)) == 5


async def test_a_body_may_come_byte_by_byte(fleet: ScriptedFleet) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    ((status, _),) = answers(
        await exchange(fleet, POST + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    )
    assert status == 200


TINY = {
    "lists": (b'{"messages": [' + b"[]," * 300_001 + b"[]]}", "opening brackets"),
    "objects": (b'{"messages": [' + b'{"a":0},' * 150_001 + b"0]}", "opening brackets"),
    "fields": (b"{" + b",".join(b'"%x":0' % number for number in range(300_001)) + b"}", "names of fields"),
    "numbers": (
        b'{"prompt": [' + b"0," * 3_000_001 + b"0]}",
        "3000001 commas outside of strings, at most 3000000",
    ),
}


@pytest.mark.parametrize("kind", TINY)
async def test_a_body_of_very_many_tiny_values_is_not_unpacked(fleet: ScriptedFleet, kind: str) -> None:
    """64 MB of `[],` would be 1.4 GB of lists."""
    tiny, words = TINY[kind]
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/media/embeddings"):
            status, error = await refused(session, fleet.url + path, tiny)
            assert (status, error["code"]) == (400, "invalid_request")
            assert words in error["message"]
            assert "are allowed" in error["message"]


async def test_texts_of_many_commas_are_read(fleet: ScriptedFleet) -> None:
    text = json.dumps({"messages": [{"role": "user", "content": '"a", [b] ' * 400_000}]}).encode()
    async with aiohttp.ClientSession() as session:
        status, error = await refused(session, f"{fleet.url}/v1/chat/completions", text)
    assert (status, error["code"]) == (400, "context_length_exceeded")


async def refused(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=io.BytesIO(body), headers=headers) as response:
        return response.status, (await response.json())["error"]


ODD_JSON: list[tuple[bytes, str | None]] = [
    (b'{"messages": [{"role": "user", "content": "hi"}], "seed": 1e400}', None),
    (b'{"messages": [{"role": "user", "content": "hi"}], "n": 1e300}', "n"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 999999999999999999999}', "max_tokens"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": -0.1e-400}', ""),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
    (b'{"messages": [{"role": "user", "content": "hi\xff"}]}', None),
    (b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "hi"}]}', None),
    (b'\xff\xfe{\x00}\x00', None),
    (b'{"messages": [{"role": "user", "content": "hi"}]} trailing', None),
    (b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}", None),
    (b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}", "messages"),
    (b'{"messages": [{"role": "user", "role": "tool", "content": "hi"}]}', "messages[0].tool_call_id"),
    (b'{"messages": [{"role": "user\\n200 OK", "content": "hi"}]}', "messages[0].role"),
    (b'{"messages": {"0": {"role": "user"}}}', "messages"),
    (b'{"messages": [{"role": "user", "content": [[]]}]}', "messages[0].content[0]"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"\\u0661": 1}}', "logit_bias"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"-1": 1}}', "logit_bias"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "stop": ["%s"]}' % (b"x" * 100_000), "stop[0]"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "model": "%s"}' % (b"m" * 100_000), "model"),
    (b"[]", None),
    (b'"text"', None),
    (b"null", None),
    (b" ", None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), ODD_JSON, ids=range(len(ODD_JSON)))
async def test_odd_json_is_refused_briefly_or_read(
    fleet: ScriptedFleet, body: bytes, param: str | None
) -> None:
    """An empty `param`: it is read after all."""
    head = POST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(body)
    ((status, answer),) = answers(await exchange(fleet, head + body))
    if param == "":
        assert status == 200
        return
    assert (status, answer["error"]["param"]) == (400, param)
    assert len(answer["error"]["message"]) < 300
    assert answer["error"]["message"].isprintable()
