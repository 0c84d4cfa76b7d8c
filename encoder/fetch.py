"""Downloads media for an encoder, guarded: what a client's URL may reach, how long and how much.

Fetch worker. Every hop of a redirect is judged anew, and the address connected to is the one that was judged.
Knows nothing of media formats or requests.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader
from yarl import URL

from transom.encoder.config import EncoderConfig
from transom.encoder.known_urls import Validator
from transom.encoder.local_files import LocalFiles, is_file_url
from transom.encoder.resolver import JudgingResolver, RefusedAddressError, is_public
from transom.errors import MediaError

logger = logging.getLogger(__name__)

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 256 * 1024
_MAX_URL_CHARS = 8192
_MAX_HOST_CHARS, _MAX_LABEL_CHARS = 253, 63  # RFC 1035
_MAX_INTERIM = 16


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What may be fetched. `ports` with 0 allows any; no domains allow nothing."""

    connect_s: float
    read_s: float
    total_s: float
    max_bytes: int
    max_redirects: int
    concurrency: int
    schemes: tuple[str, ...]
    ports: tuple[int, ...]
    domains: tuple[str, ...]
    allow_private: bool
    folders: tuple[str, ...] = ()
    dns_servers: tuple[str, ...] = ()  # instead of the system's resolver

    @classmethod
    def of(cls, config: EncoderConfig) -> FetchLimits:
        """Take the limits out of the process's settings."""
        return cls(
            connect_s=config.fetch_connect_s,
            read_s=config.fetch_read_s,
            total_s=config.fetch_total_s,
            max_bytes=int(config.max_media_mb * 1024 * 1024),
            max_redirects=config.fetch_max_redirects,
            concurrency=config.fetch_concurrency,
            schemes=config.fetch_schemes,
            ports=config.fetch_ports,
            domains=config.fetch_domains,
            allow_private=config.allow_private_addresses,
            folders=config.media_folders,
            dns_servers=config.fetch_dns_servers,
        )


def _host_of(url: str) -> str:
    """Return the host as the HTTP client will read it.

    The client maps a host to ASCII first (IDNA, which turns fullwidth digits and ideographic stops into
    plain ones), so that is what must be judged: `http://127\u30020\u30020\u30021/` is loopback.
    """
    return (URL(url).raw_host or "").rstrip(".").lower()


def _is_numeric(host: str) -> bool:
    """Whether the system takes the host for an IPv4 address, in whatever spelling (2130706433, 0x7f.1)."""
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True


def domain_allowed(host: str, domains: Sequence[str]) -> bool:
    """Whether a host is on the list: itself, below a "*.domain", or by "*"."""
    for domain in domains:
        pattern = domain.lower().rstrip(".")
        if pattern == "*" or host == pattern:
            return True
        if pattern.startswith("*.") and host.endswith(pattern[1:]):
            return True
    return False


def check_length(url: str) -> None:
    """Raise MediaError for a URL that is too long to be one."""
    if len(url) > _MAX_URL_CHARS:
        raise MediaError(f"URL of {len(url)} characters, limit {_MAX_URL_CHARS}")


def check_url(url: str, limits: FetchLimits) -> SplitResult:
    """Raise MediaError unless scheme, port, host and form of a URL are allowed; resolve nothing."""
    check_length(url)
    if any(ord(char) <= 32 or ord(char) == 127 for char in url) or "\\" in url:
        raise MediaError("URL holds a space, a control character or a backslash")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = _host_of(url)
    except ValueError:  # what the URL and IDNA libraries say of it helps nobody
        raise MediaError("URL is malformed: no valid host or port") from None
    scheme = parts.scheme.lower()
    if scheme not in limits.schemes:
        allowed = ", ".join(limits.schemes) or "none"
        raise MediaError(f"URL scheme {scheme[:20]!r} is not allowed; allowed: {allowed}")
    if parts.username is not None or parts.password is not None:
        raise MediaError("URL carries a user name or password")
    if not host:
        raise MediaError("URL has no host")
    if len(host) > _MAX_HOST_CHARS or any(len(label) > _MAX_LABEL_CHARS for label in host.split(".")):
        raise MediaError(f"URL host is too long; DNS allows {_MAX_LABEL_CHARS} characters between dots")
    actual_port = port if port is not None else (443 if scheme == "https" else 80)
    if 0 not in limits.ports and actual_port not in limits.ports:
        allowed = ", ".join(map(str, limits.ports)) or "none"
        raise MediaError(f"URL port {actual_port} is not allowed; allowed: {allowed}")
    if not domain_allowed(host, limits.domains):
        raise MediaError(f"URL host {host!r} is not on the list of allowed domains")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if _is_numeric(host):
            raise MediaError(f"URL host {host!r} is an unusual spelling of an address") from None
        return parts
    # A literal never reaches the resolver, where names are judged.
    if not limits.allow_private and not is_public(host):
        raise MediaError(f"URL host {host!r} is not a public address")
    return parts


class _Body:
    """Collects a response, inflating it where the server compressed it, up to a size."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self.data = bytearray()
        self._max_bytes = max_bytes
        self._received = 0  # as they travel: packed bytes may inflate to nothing for ever
        self._inflate: Any = None
        encoding = encoding.strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        elif encoding not in ("", "identity"):
            raise MediaError(f"the URL's server sends Content-Encoding {encoding[:20]!r}, which is not read")

    def add(self, chunk: bytes) -> None:
        self._received += len(chunk)
        if self._inflate is not None:
            if self._received > self._max_bytes + _CHUNK_BYTES:
                raise MediaError(f"media at the URL is larger than {self._max_bytes} bytes, the limit")
            try:
                chunk = self._inflate.decompress(chunk, self._max_bytes - len(self.data) + 1)
            except zlib.error:
                raise MediaError("the URL's content is badly compressed") from None
            if self._inflate.unused_data:  # zlib would keep all of it
                raise MediaError("the URL's compressed content goes on after its end")
        self.data += chunk
        if len(self.data) > self._max_bytes:
            raise MediaError(f"media at the URL is larger than {self._max_bytes} bytes, the limit")

    def finish(self) -> bytearray:
        if self._inflate is not None and not self._inflate.eof:
            raise MediaError("the URL's compressed content is cut off")
        return self.data


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a URL gave, and how to ask next time whether it changed."""

    data: bytearray
    validator: Validator | None


class _Protocol(ResponseHandler):
    """Ends a connection whose server only says, again and again, that an answer will come (1xx)."""

    _interim = 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take one response, final or not."""
        self._interim = self._interim + 1 if 100 <= data[0].code < 200 else 0
        if self._interim <= _MAX_INTERIM:
            super().feed_data(data, size)
        elif self.exception() is None:
            self.set_exception(aiohttp.ClientError("too many interim responses"))
            if self.transport is not None:
                self.transport.abort()


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = partial(_Protocol, loop=self._loop)  # type: ignore[assignment]


class Fetcher:
    """Downloads under limits. All methods run on the loop that called `start`."""

    def __init__(self, limits: FetchLimits) -> None:
        self.limits = limits
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._files = LocalFiles(limits.folders, limits.max_bytes)

    async def start(self) -> None:
        """Open the session; no request is made."""
        limits = self.limits
        self._resolver = JudgingResolver(limits.allow_private, limits.dns_servers)
        connector = _Connector(
            resolver=self._resolver,
            use_dns_cache=False,
            limit=limits.concurrency,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers={"User-Agent": "transom-encoder", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_s, connect=limits.total_s, sock_read=limits.read_s
            ),
        )

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()
            await self._resolver.close()

    async def fetch(self, url: str, known: Validator | None = None) -> Fetched | None:
        """Return the bytes at a URL; None when its server says that they are still what `known` names.

        Raise MediaError that says what forbade or ended it.
        """
        async with self._slots:
            if is_file_url(url):
                return Fetched(await asyncio.to_thread(self._files.read, url), None)
            try:
                async with asyncio.timeout(self.limits.total_s):
                    return await self._follow(url, known)
            except aiohttp.SocketTimeoutError as error:
                limit = (
                    f"no connection within {self.limits.connect_s:g} s"
                    if isinstance(error, aiohttp.ConnectionTimeoutError)
                    else f"no data for {self.limits.read_s:g} s"
                )
                raise MediaError(f"download of the URL failed: {limit}, the limit") from None
            except TimeoutError:
                raise MediaError(
                    f"download of the URL took over {self.limits.total_s:g} s, the limit"
                ) from None
            except aiohttp.ClientError as error:
                refused = _cause(error, RefusedAddressError)
                if refused is not None:
                    logger.info("a URL is refused: %s", refused)
                if isinstance(error, aiohttp.ClientConnectorDNSError) and not self.limits.allow_private:
                    # One answer for both: else a client could ask which names there are inside.
                    raise MediaError(
                        f"URL host {error.host[:255]!r} is not known or has no public address"
                    ) from None
                raise MediaError(f"download of the URL failed: {_reason(error)}") from None
            except (OSError, ValueError):
                raise MediaError("download of the URL failed: no connection to its server") from None

    async def _follow(self, url: str, known: Validator | None) -> Fetched | None:
        assert self._session is not None
        for _ in range(self.limits.max_redirects + 1):
            check_url(url, self.limits)
            condition = known.headers(url) if known is not None else {}
            async with self._session.get(URL(url), headers=condition, allow_redirects=False) as response:
                if response.status == 304 and condition:
                    return None
                if response.status not in _REDIRECTS:
                    return Fetched(await self._read(response), Validator.of(url, response.headers))
                location = response.headers.get("Location")
                if not location:
                    raise MediaError(f"the URL's server answered {response.status} without a Location")
                response.close()
            url = urljoin(url, location)
        raise MediaError(f"the URL redirects more than {self.limits.max_redirects} times, the limit")

    async def _read(self, response: aiohttp.ClientResponse) -> bytearray:
        if response.status != 200:
            raise MediaError(f"the URL's server answered {response.status}")
        max_bytes = self.limits.max_bytes
        body = _Body(response.headers.get("Content-Encoding", ""), max_bytes)
        if response.content_length is not None and response.content_length > max_bytes:
            raise MediaError(f"media at the URL has {response.content_length} bytes, limit {max_bytes}")
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body.add(chunk)
        return body.finish()


_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ClientConnectorDNSError, "the name of its host is not known"),
    (aiohttp.ClientConnectorCertificateError, "the certificate of its server is not valid"),
    (aiohttp.ClientSSLError, "no secure connection to its server"),
    (aiohttp.ServerDisconnectedError, "its server closed the connection without an answer"),
    (aiohttp.ClientConnectionError, "no connection to its server"),
    (aiohttp.ClientPayloadError, "the content is cut off"),
    (aiohttp.InvalidURL, "it is malformed"),
)


def _reason(error: aiohttp.ClientError) -> str:
    """Return what went wrong in words of our own: the library's name addresses and ports."""
    known = (words for kind, words in _REASONS if isinstance(error, kind))
    return next(known, "its server's answer is not HTTP")


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """Return the error of a kind in the chain that led to `error`."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, kind):
            return error
        error, seen = error.__cause__ or error.__context__ or getattr(error, "os_error", None), seen + 1
    return None
