"""Downloads from a hostile origin: where they may go, how long, how much, and what is said when not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.patience import PATIENCE_S
from transom.encoder.config import EncoderConfig
from transom.encoder.fetch import Fetcher, FetchLimits, check_url, domain_allowed
from transom.encoder.resolver import is_public
from transom.errors import MediaError

PUBLIC = FetchLimits.of(EncoderConfig())
# Only here: the origin of these tests is on loopback, at any port.
LOCAL = dataclasses.replace(
    PUBLIC,
    allow_private=True,
    ports=(0,),
    max_bytes=100_000,
    connect_s=PATIENCE_S,
    read_s=PATIENCE_S,
    total_s=PATIENCE_S,
)
BODY = bytes(range(256)) * 100


NOT_PUBLIC = """
127.0.0.1 127.8.8.8 0.0.0.0 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254
100.64.0.1 192.0.2.1 198.18.0.1 203.0.113.9 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255
:: ::1 fe80::1 fe80::1%eth0 fc00::1 fd00::1 ff02::1 2001:db8::1 ::ffff:127.0.0.1
::ffff:10.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
2002:7f00:1::1 2002:a00:1:: 0x7f000001 2130706433
"""


@pytest.mark.parametrize("address", [*NOT_PUBLIC.split(), "not an address", ""])
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///etc/passwd", "scheme 'file' is not allowed"),
        ("ftp://example.com/a.png", "scheme 'ftp'"),
        ("gopher://example.com/", "scheme 'gopher'"),
        ("data:image/png;base64,AAAA", "scheme 'data'"),
        ("//example.com/a.png", "scheme ''"),
        ("http:///a.png", "no host"),
        ("http://user:secret@example.com/a.png", "user name or password"),
        ("http://user@example.com/a.png", "user name or password"),
        ("http://example.com:22/", "port 22 is not allowed; allowed: 80, 443"),
        ("http://example.com:99999/", "malformed"),
        (f"http://{'a' * 64}.com/", "host is too long"),
        (f"http://{'a.' * 127}com/", "host is too long"),
        ("http://[::1/a.png", "malformed"),
        ("http://127.0.0.1/a.png", "'127.0.0.1' is not a public address"),
        ("http://[::1]/", "not a public address"),
        ("http://[fd00::1]/", "not a public address"),
        ("http://[::ffff:169.254.169.254]/latest/meta-data", "not a public address"),
        ("http://0.0.0.0/", "not a public address"),
        # What a client maps to ASCII before it connects: circled and fullwidth digits, other full stops.
        ("http://\u2460\u2461\u2466.0.0.1/a.png", "'127.0.0.1' is not a public address"),
        ("http://\uff11\uff12\uff17.0.0.1/a.png", "'127.0.0.1' is not a public address"),
        ("http://127\u30020\u30020\u30021/a.png", "'127.0.0.1' is not a public address"),
        ("http://169.254.169\uff0e254/latest/", "'169.254.169.254' is not a public address"),
        ("http://127.0.0.1\u3002/a.png", "'127.0.0.1' is not a public address"),
        ("http://exam ple.com/", "space"),
        ("http://example.com\\@127.0.0.1/", "backslash"),
        ("http://example.com/\r\nHost: evil", "control character"),
        ("http://example.com/" + "a" * 9000, "URL of 9019 characters, limit 8192"),
    ],
)
def test_urls_that_are_refused_unresolved(url: str, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        check_url(url, PUBLIC)


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "127.1",
        "0x7f.1",
        "0177.0.0.1",
        "\uff12130706433",
        "localhost",
        "LOCALHOST",
        "localhost.",
    ],
)
async def test_spellings_of_loopback_are_refused_by_what_they_resolve_to(host: str) -> None:
    fetcher = Fetcher(PUBLIC)
    await fetcher.start()
    try:
        # "localhost." resolves on some systems only.
        with pytest.raises(MediaError, match=r"no public address|spelling of an address"):
            await fetcher.fetch(f"http://{host}/a.png")
    finally:
        await fetcher.close()


async def test_a_name_with_one_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator's log says which address; the client, who may not know it, is not told."""

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("93.184.216.34", "169.254.169.254")
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    fetcher = Fetcher(PUBLIC)
    await fetcher.start()
    with caplog.at_level("INFO"), pytest.raises(MediaError) as refused:
        await fetcher.fetch("http://metadata.example/a.png")
    await fetcher.close()
    assert refused.value.message == "URL host 'metadata.example' is not known or has no public address"
    assert "metadata.example stands for 169.254.169.254" in caplog.text


def test_domain_lists_fail_closed_and_match_whole_labels() -> None:
    assert not domain_allowed("example.com", ())
    assert domain_allowed("example.com", ("*",))
    assert domain_allowed("example.com", ("Example.com.",))
    assert domain_allowed("a.b.example.com", ("*.example.com",))
    assert not domain_allowed("example.com", ("*.example.com",))
    assert not domain_allowed("evilexample.com", ("*.example.com", "example.com"))
    assert not domain_allowed("example.com.evil.org", ("example.com", "*.example.com"))
    with pytest.raises(MediaError, match="not on the list"):
        check_url("http://example.com/", dataclasses.replace(PUBLIC, domains=()))


class Origin:
    """A server whose handlers a test sets; `hits` counts requests by path."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        self.base = ""
        self._app = web.Application()
        self._app.router.add_get("/{path:.*}", self._answer)
        self.handler: Callable[[web.Request], Any] = self._body

    async def _body(self, request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.hits.append(request.path)
        return await self.handler(request)  # type: ignore[no-any-return]

    async def start(self) -> web.AppRunner:
        runner = web.AppRunner(self._app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    own = Origin()
    runner = await own.start()
    yield own
    await runner.cleanup()


async def fetched(url: str, **changes: Any) -> bytes:
    fetcher = Fetcher(dataclasses.replace(LOCAL, **changes))
    await fetcher.start()
    try:
        result = await fetcher.fetch(url)
        assert result is not None
        return bytes(result.data)
    finally:
        await fetcher.close()


async def test_a_good_url_gives_its_bytes(origin: Origin) -> None:
    assert await fetched(f"{origin.base}/a.png?x=1#part") == BODY
    assert origin.hits == ["/a.png"]


async def test_no_proxy_of_the_environment_is_asked(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would connect to what was judged here, by a name that it resolves anew."""
    proxy = Origin()
    runner = await proxy.start()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy.base)
        monkeypatch.setenv(name.upper(), proxy.base)
    monkeypatch.setenv("no_proxy", "")
    assert await fetched(f"{origin.base}/a.png") == BODY
    assert (origin.hits, proxy.hits) == (["/a.png"], [])
    await runner.cleanup()


async def test_redirects_are_followed_as_far_as_allowed(origin: Origin) -> None:
    async def hop(request: web.Request) -> web.Response:
        left = int(request.path[1:])
        return (
            web.Response(status=302, headers={"Location": str(left - 1)}) if left else web.Response(body=BODY)
        )

    origin.handler = hop
    assert await fetched(f"{origin.base}/5") == BODY
    with pytest.raises(MediaError, match="redirects more than 5 times, the limit"):
        await fetched(f"{origin.base}/11")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("file:///etc/passwd", "scheme 'file'"),
        ("http://user:pw@127.0.0.1/", "user name"),
        ("http://169.254.169.254/latest/meta-data/", "not on the list"),
        ("http://127.0.0.1:22/", "port 22"),
        ("http://other.example/", "not on the list"),
    ],
)
async def test_every_hop_is_judged(origin: Origin, target: str, said: str) -> None:
    async def hop(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": target})

    origin.handler = hop
    port = int(origin.base.rsplit(":", 1)[1])
    with pytest.raises(MediaError, match=said):
        await fetched(f"{origin.base}/a.png", ports=(port, 80), domains=("127.0.0.1",))
    assert origin.hits == ["/a.png"]


async def test_a_public_first_hop_does_not_open_private_ones(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def resolve(host: str, port: Any, **options: Any) -> Any:
        return await real("127.0.0.1" if host == "public.example" else host, port, **options)

    async def hop(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": origin.base.replace("127.0.0.1", "localhost")})

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    # The judge is blind to the first name only, as if it were public.
    monkeypatch.setattr(
        "transom.encoder.resolver.JudgingResolver.resolve", _blind_to("public.example"), raising=True
    )
    origin.handler = hop
    with pytest.raises(MediaError, match="'localhost' is not known or has no public address"):
        await fetched(origin.base.replace("127.0.0.1", "public.example"), allow_private=False)
    assert origin.hits == ["/"]


def _blind_to(name: str) -> Any:
    from transom.encoder.resolver import JudgingResolver

    judge = JudgingResolver.resolve

    async def resolve(self: Any, host: str, *args: Any, **options: Any) -> Any:
        if host != name:
            return await judge(self, host, *args, **options)
        return await judge(JudgingResolver(allow_private=True), host, *args, **options)

    return resolve


async def test_size_is_limited_by_header_and_while_streaming(origin: Origin) -> None:
    with pytest.raises(MediaError, match="has 25600 bytes, limit 1000"):
        await fetched(f"{origin.base}/a", max_bytes=1000)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)

    origin.handler = endless
    with pytest.raises(MediaError, match="larger than 100000 bytes, the limit"):
        await fetched(f"{origin.base}/a")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_bodies_are_inflated_up_to_the_limit(origin: Origin, encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    content = b""

    async def packed(request: web.Request) -> web.Response:
        return web.Response(body=content, headers={"Content-Encoding": encoding})

    origin.handler = packed
    content = pack(BODY)
    assert await fetched(f"{origin.base}/a") == BODY
    content = pack(b"\0" * 50_000_000)
    assert len(content) < 100_000
    with pytest.raises(MediaError, match="larger than 100000 bytes, the limit"):
        await fetched(f"{origin.base}/a")
    content = pack(BODY)[:-20]
    with pytest.raises(MediaError, match="cut off"):
        await fetched(f"{origin.base}/a")
    content = b"not compressed at all"
    with pytest.raises(MediaError, match="badly compressed"):
        await fetched(f"{origin.base}/a")


@pytest.mark.parametrize(
    ("head", "rest", "said"),
    [
        (gzip.compress(BODY), b"x" * 1000, "goes on after its end"),
        (gzip.compress(BODY), gzip.compress(BODY), "goes on after its end"),
        # Blocks of no bytes: nothing comes of them, for ever.
        (gzip.compress(b"")[:10], b"\0\0\0\xff\xff" * 2000, "larger than 100000 bytes, the limit"),
    ],
)
async def test_packed_bodies_that_do_not_end_are_not_kept(
    origin: Origin, head: bytes, rest: bytes, said: str
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Encoding": "gzip"})
        await response.prepare(request)
        await response.write(head)
        while True:
            await response.write(rest)

    origin.handler = endless
    with pytest.raises(MediaError, match=said):
        await fetched(f"{origin.base}/a")


async def test_foreign_encodings_and_statuses_are_told(origin: Origin) -> None:
    async def strange(request: web.Request) -> web.Response:
        if request.path == "/br":
            return web.Response(body=BODY, headers={"Content-Encoding": "br"})
        return web.Response(status=int(request.path[1:]))

    origin.handler = strange
    with pytest.raises(MediaError, match="Content-Encoding 'br'"):
        await fetched(f"{origin.base}/br")
    for status in (204, 304, 401, 404, 500):
        with pytest.raises(MediaError, match=f"answered {status}"):
            await fetched(f"{origin.base}/{status}")
    with pytest.raises(MediaError, match="302 without a Location"):
        await fetched(f"{origin.base}/302")


async def test_silence_and_dripping_are_cut(origin: Origin) -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while request.path == "/drip":
            await response.write(b"x")
            await asyncio.sleep(0.05)
        await release.wait()
        return response

    origin.handler = slow
    with pytest.raises(MediaError, match=r"no data for 0\.2 s, the limit"):
        await fetched(f"{origin.base}/silent", read_s=0.2)
    with pytest.raises(MediaError, match=r"took over 0\.5 s, the limit"):
        await fetched(f"{origin.base}/drip", total_s=0.5)
    release.set()


async def test_a_closed_port_and_a_dead_name_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(MediaError, match="download of the URL failed"):
            await fetched(f"http://127.0.0.1:{port}/a")

    async def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    with pytest.raises(MediaError, match="the name of its host is not known"):
        await fetched("http://nowhere.example/a")


async def test_slow_hosts_do_not_wait_for_each_other(origin: Origin) -> None:
    together = asyncio.Barrier(4)

    async def slow(request: web.Request) -> web.Response:
        await together.wait()  # answers only when all four requests are there
        return web.Response(body=BODY)

    origin.handler = slow
    fetcher = Fetcher(LOCAL)
    await fetcher.start()
    results = await asyncio.gather(*(fetcher.fetch(f"{origin.base}/{n}") for n in range(4)))
    await fetcher.close()
    assert [bytes(result.data) for result in results if result is not None] == [BODY] * 4


async def test_a_server_that_only_promises_an_answer_is_cut_off() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    told = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal told
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        with contextlib.suppress(ConnectionError):
            if path == b"/some":
                writer.write(hints * 5 + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody")
            while path == b"/endless":
                writer.write(hints * 50)
                told += 50
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        assert await fetched(f"{base}/some") == b"body"
        with pytest.raises(MediaError, match="its server's answer is not HTTP"):
            await fetched(f"{base}/endless")
    assert told < 100_000


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9\r\n", "its server's answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "the content is cut off"),
    ],
)
async def test_what_went_wrong_is_said_without_the_librarys_words(answer: bytes, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(MediaError) as caught:
            await fetched(f"http://127.0.0.1:{port}/a.png")
    assert said in caught.value.message
    assert str(port) not in caught.value.message
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and never listens
        port = silent.getsockname()[1]
        with pytest.raises(MediaError) as refused:
            await fetched(f"http://127.0.0.1:{port}/a.png")
    assert refused.value.message == "download of the URL failed: no connection to its server"


@pytest.mark.parametrize(
    "url", ["http://xn--\u00fc.example/", "http://a\u00df\u0000.example/", "http://[::zz]/"]
)
def test_a_host_that_is_none_is_refused_in_our_words(url: str) -> None:
    with pytest.raises(MediaError) as caught:
        check_url(url, PUBLIC)
    assert not any(word in caught.value.message.lower() for word in ("codepoint", "idna", "label", "ipv6"))
