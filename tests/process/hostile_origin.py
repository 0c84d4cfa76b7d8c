"""A whole pipeline among hostile media servers, in a network of its own; its clients ask from there too.

Run as a program: plays the origins, the DNS that lies and what must never be asked, starts `transom up`, asks
for all cases side by side and good questions beside them. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.lying_network import METADATA, PRIVATE, PUBLIC, REDIRECTS, SECRET, enter_namespace, start_dns
from tests.process import media
from tests.process.conftest import Pipeline
from tests.process.test_disconnects import until_nothing_is_held

TOTAL_S, READ_S, MAX_MEDIA_MB = 30.0, 15.0, 1.0  # far above what an honest server needs on a slow machine
AT_ONCE = 12  # hostile ones: more could be answered 429 where memory, and so the pools, are small
PNG = media.picture("red", "circle")
GOOD = "http://honest.test/good.png"
MORE_REDIRECTS = {
    "metadata": f"http://{METADATA}/latest/meta-data/", "private": f"http://{PRIVATE}/",
    "mapped": "http://[::ffff:127.0.0.1]/secret", "password": "http://me:secret@honest.test/good.png",
    "inside": "http://metadata.google.internal/", "nowhere": "//", "data": "data:image/png;base64,AAAA",
}  # fmt: skip
STATUSES = (204, 206, 304, 401, 403, 404, 407, 429, 500, 503)
# What never leaves the gateway's guard: case -> URL.
SPELLINGS = {
    "loopback": "http://127.0.0.1/secret", "number": "http://2130706433/secret", "hex": "http://0x7f.1/secret",
    "octal": "http://0177.0.0.1/secret", "short": "http://127.1/secret", "zero": "http://0.0.0.0/secret",
    "six": "http://[::1]/secret", "mapped": "http://[::ffff:127.0.0.1]/secret", "local six": "http://[fd00::1]/",
    "nat64": "http://[64:ff9b::7f00:1]/secret", "metadata": f"http://{METADATA}/latest/meta-data/",
    "private": f"http://{PRIVATE}/", "wide": "http://\uff11\uff12\uff17.0.0.1/secret",
    "stops": "http://127\u30020\u30020\u30021/secret", "localhost": "http://localhost/secret",
    "capitals": "http://LOCALHOST./secret", "port": "http://honest.test:8080/", "ssh": "http://honest.test:22/",
    "password": "http://me:secret@honest.test/good.png", "file": "file:///etc/passwd", "ftp": "ftp://honest.test/",
}  # fmt: skip
NAMES = ("inner.test", "mixed.test", "alias.test", "mapped.test", "six.test", "metadata.google.internal",
         "unknown.test", "silent.test")  # fmt: skip
LYING_HEADS = {
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + PNG,
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n" + PNG,
    "cut": b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 300\r\n\r\n" + PNG,
    "huge": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + PNG,
    "negative": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n" + PNG,
    "word": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n" + PNG,
    "two": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n" + PNG,
    "ssh": b"SSH-2.0-OpenSSH_9\r\n",
    "nothing": b"",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}
HTML = b"<!DOCTYPE html><html><body><h1>Log in</h1></body></html>"


def content(kind: str, data: bytes, *more: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {kind}", f"Content-Length: {len(data)}", *more, "", ""]
    return "\r\n".join(lines).encode("latin-1") + data


def header_bomb() -> bytes:
    """Return a PNG of a few hundred bytes that says it has 100,000 x 100,000 pixels."""
    size = (100_000).to_bytes(4, "big")
    head = b"IHDR" + size * 2 + b"\x08\x02\0\0\0"
    data = b"IDAT" + zlib.compress(b"\0" * 1000)
    parts = [
        len(part[4:]).to_bytes(4, "big") + part + zlib.crc32(part).to_bytes(4, "big") for part in (head, data)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


ANSWERS = {
    "good.png": content("image/png", PNG),
    "honest.html": content("text/html", PNG),
    "packed.png": content("image/png", gzip.compress(PNG), "Content-Encoding: gzip"),
    "tagged.png": content("image/png", PNG, 'ETag: "\xff\xfe"'),
    "unmeasured.png": b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + PNG,
    "html.png": content("image/png", HTML),
    "bomb": content("image/png", gzip.compress(b"\0" * 50_000_000), "Content-Encoding: gzip"),
    "packed.txt": content("image/png", b"not packed", "Content-Encoding: gzip"),
    "br": content("image/png", PNG, "Content-Encoding: br"),
    "header": content("image/png", header_bomb()),
    **LYING_HEADS,
    **{
        str(status): f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
        'WWW-Authenticate: Basic realm="x"\r\n\r\n'.encode()
        for status in STATUSES
    },
    **{
        path: f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()
        for path, target in (REDIRECTS | MORE_REDIRECTS).items()
    },
}


class Origins:
    """Servers of public addresses, whose answers lie, and of those that nobody may reach. Counts both."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.forbidden: Counter[str] = Counter()

    async def start(self) -> None:
        await asyncio.start_server(self._answer, PUBLIC, 80)
        reached = [(SECRET, 80), (METADATA, 80), (PRIVATE, 80), ("::1", 80), (PUBLIC, 8080), (PUBLIC, 22)]
        for address, port in reached:
            with contextlib.suppress(OSError if ":" in address else ()):  # no IPv6 here
                await asyncio.start_server(self._count, address, port)

    async def _count(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Even a connection without a request is one too many."""
        address, port = writer.get_extra_info("sockname")[:2]
        self.forbidden[f"{address}:{port}"] += 1
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode().lstrip("/")
            self.asked[path] += 1
            await self._send(path, writer)
            await reader.read()  # until the other side has gone
        writer.close()

    async def _send(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path in ANSWERS:
            writer.write(ANSWERS[path])
            await writer.drain()
            writer.write_eof()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\n\r\n" + PNG[:50])
        while path == "endless":
            writer.write(b"\0" * 65536)
            await writer.drain()
        while path.startswith("drip"):
            writer.write(b"\0")
            await writer.drain()
            await asyncio.sleep(0.2)  # what a server like this does; nobody waits for it


def cases() -> dict[str, str]:
    """Return the URLs that must be refused, by case."""
    found = {f"url {case}": url for case, url in SPELLINGS.items()}
    found |= {f"name {name}": f"http://{name}/a.png" for name in NAMES}
    found |= {f"to {path}": f"http://honest.test/{path}" for path in (REDIRECTS | MORE_REDIRECTS)}
    # A redirect of a name to itself, which means another address by then.
    found["to self"] = "http://hop.test/self"
    del found["to elsewhere"]
    plain = ["endless", "drip", "silent", "html.png", "bomb", "packed.txt", "br", "header", *LYING_HEADS]
    found |= {f"body {path}": f"http://honest.test/{path}" for path in plain}
    found |= {f"status {status}": f"http://honest.test/{status}" for status in STATUSES}
    return found


def part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


class Client:
    """Asks the gateway, and notes what came of it by case."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.results: dict[str, Any] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    async def ask(self, case: str, *parts: dict[str, Any], **more: Any) -> None:
        text = {"type": "text", "text": "What is in this picture?"}
        message = {"role": "user", "content": [text, *parts]}
        body = {"messages": [message], "temperature": 0, "max_tokens": 60, **more}
        begin = time.monotonic()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            said = await response.json()
        self.results[case] = {"status": response.status, "took_s": time.monotonic() - begin, "said": said}

    async def bad(self, number: int, case: str, url: str) -> None:
        """Ask with a good picture first, so that the second part is to blame."""
        async with self._room:
            await self.ask(case, part("image", GOOD), part("image", url), stream=number % 2 == 0)

    async def good(self) -> None:
        """Ask good questions in a row, as somebody who knows nothing of the others."""
        for name in ("good.png", "honest.html", "packed.png", "tagged.png", "unmeasured.png"):
            number = len([case for case in self.results if case.startswith("good")])
            await self.ask(f"good {number} {name}", part("image", f"http://honest.test/{name}"))


@contextlib.asynccontextmanager
async def running(dns: str) -> AsyncIterator[Pipeline]:
    settings = {
        "FETCH_DNS_SERVERS": dns,
        "FETCH_TOTAL_S": TOTAL_S,
        "FETCH_READ_S": READ_S,
        "FETCH_CONNECT_S": READ_S,
        "MAX_MEDIA_MB": MAX_MEDIA_MB,
    }
    env = {f"TRANSOM_ENCODER_{name}": str(value) for name, value in settings.items()}
    env["TRANSOM_GATEWAY_KEEPALIVE_S"] = "600"  # else a stream begins before it can be refused with a status
    pipeline = await asyncio.to_thread(Pipeline, env=env)
    try:
        yield pipeline
    finally:
        await asyncio.to_thread(pipeline.stop)


async def main() -> dict[str, Any]:
    """Start all of it, ask for everything, return what came of it."""
    origins = Origins()
    await origins.start()
    dns, server = await start_dns()
    connector = aiohttp.TCPConnector(limit=0)
    async with running(server) as pipeline, aiohttp.ClientSession(connector=connector) as session:
        client = Client(session, pipeline.url)
        await client.ask("rebound first", part("image", "http://rebind.test/good.png"))
        asked_at_first = dns.asked["rebind.test"]
        asking = [client.bad(number, case, url) for number, (case, url) in enumerate(cases().items())]
        asking += [client.bad(0, f"rebound {word}", f"http://rebind.test/{word}.png") for word in ("a", "b")]
        asking += [client.ask(f"html {kind}", part(kind, "http://honest.test/html.png"))
                   for kind in ("video", "audio")]  # fmt: skip
        asking.append(client.ask("deadline", part("image", "http://honest.test/drip?deadline"), timeout=0.5))
        await asyncio.gather(*asking, client.good())
        await client.good()
        await until_nothing_is_held(session, pipeline.url)
    return {
        "cases": client.results,
        "forbidden": dict(origins.forbidden),
        "origin": dict(origins.asked),
        "names": dict(dns.asked),
        "asked_at_first": asked_at_first,
        "leaks": await asyncio.to_thread(pipeline.leaks),
        "log": pipeline.log(last=100_000),
    }


if __name__ == "__main__":
    enter_namespace()
    print(json.dumps(asyncio.run(main())))  # noqa: T201
