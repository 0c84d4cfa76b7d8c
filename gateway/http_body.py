"""The body of a JSON request: its declared type and encoding, its size and its time, before anything else.

Gateway process. What is compressed counts by what it becomes, while it is read. Knows nothing of fields.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from transom.errors import PayloadTooLargeError, RequestError

ENCODINGS = ("gzip", "deflate")
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_INLINE_BYTES = 64 * 1024  # more is inflated in a thread
_STEP_BYTES = 1024 * 1024

Body = bytes | bytearray


class UnsupportedMediaTypeError(RequestError):
    """A body that is not declared as JSON, or whose encoding is not known.

    JSON must be declared because a web page can send anything else across origins without asking.
    """

    status = 415
    code = "unsupported_media_type"


class ExpectationError(RequestError):
    """The client waits for something other than leave to send its body."""

    status = 417
    code = "expectation_failed"


class BodyTimeoutError(RequestError):
    """The client took too long to send its body."""

    status = 408
    code = "body_timeout"


async def hold_expectation(request: web.Request) -> None:
    """Send no `100 Continue` yet: a body that is refused by key, limit or size needn't be sent at all."""


async def _let_continue(request: web.Request) -> None:
    """Give a client that waits for it leave to send its body."""
    expected = request.headers.get("Expect", "").strip().lower()
    if not expected or request.version < HttpVersion11:
        return
    if expected != "100-continue":
        raise ExpectationError(f"Expect {expected[:40]!r} is not known, only 100-continue is")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # as aiohttp's own handler does: the answer has not begun


async def read_body(
    request: web.Request, *, limit_bytes: int, timeout_s: float, grow: Callable[[int], None]
) -> Body:
    """Return the body of a JSON request; refuse by its declared length before reading any of it.

    `grow` is told the size of each piece and may refuse it.
    """
    if request.content_type != "application/json":
        raise UnsupportedMediaTypeError(
            f"content type {request.content_type[:100]!r}, application/json is needed"
        )
    encoding = _encoding(", ".join(request.headers.getall("Content-Encoding", ())))
    declared = request.content_length
    if declared is not None and declared > limit_bytes:
        raise PayloadTooLargeError(f"body of {declared} bytes, at most {limit_bytes} are allowed")
    await _let_continue(request)
    # Grown piece by piece: to join sixty megabytes at their end holds the event loop.
    body = bytearray()
    source = request.content.iter_any()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in inflate(source, encoding) if encoding else source:
                if len(body) + len(piece) > limit_bytes:
                    raise PayloadTooLargeError(f"body of more than {limit_bytes} bytes, the limit")
                grow(len(piece))
                body += piece
    except TimeoutError:
        raise BodyTimeoutError(f"the body was not complete after {timeout_s:g} s") from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise RequestError("the body is not what its Content-Length or Transfer-Encoding says") from None
    return body


def _encoding(given: str) -> str:
    """Return the encoding by its usual name; empty for none."""
    name = given.strip().lower()
    if name in ("", "identity"):
        return ""
    if name not in _NAMES:
        raise UnsupportedMediaTypeError(
            f"Content-Encoding {given[:40]!r} is not read; send one of {', '.join(ENCODINGS)}, or none"
        )
    return _NAMES[name]


async def inflate(source: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield what compressed pieces become, in bounded steps; raise RequestError where they are broken."""
    inflater = None
    ended = False
    async for piece in source:
        rest = piece
        while rest:
            if ended and encoding != "gzip":
                raise RequestError(f"the body goes on after the end of its {encoding} data")
            if inflater is None or ended:  # gzip may consist of several parts
                inflater, ended = zlib.decompressobj(_window(encoding, rest)), False
            limit = _INLINE_BYTES
            while True:
                try:
                    out = (
                        inflater.decompress(rest, limit)
                        if limit == _INLINE_BYTES
                        else await asyncio.to_thread(inflater.decompress, rest, limit)
                    )
                except zlib.error:
                    raise RequestError(
                        f"the body is not {encoding} data, as its Content-Encoding says"
                    ) from None
                yield out
                rest = inflater.unconsumed_tail
                if not rest and len(out) < limit:
                    break
                limit = _STEP_BYTES
            ended, rest = inflater.eof, inflater.unused_data
    if not ended:
        raise RequestError(f"the body is cut off: its {encoding} data has no end")


def _window(encoding: str, start: bytes) -> int:
    """Return zlib's code of the format. Some clients send deflate without zlib's header."""
    if encoding == "gzip":
        return zlib.MAX_WBITS | 16
    return zlib.MAX_WBITS if start[0] & 0x0F == 8 else -zlib.MAX_WBITS
