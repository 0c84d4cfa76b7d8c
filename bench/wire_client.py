"""HTTP requests whose bytes are timed when they arrive and read only afterwards (`transom bench gateway`).

A general client would spend more time on a request than a gateway does, and would blur what is measured.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import orjson

from transom.errors import UnavailableError

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"  # an event stream's own bytes never end so


@dataclass(slots=True)
class Answer:
    """Raw bytes of one answer with the moment at which each piece came, in monotonic nanoseconds."""

    sent_ns: int
    pieces: list[tuple[int, bytes]] = field(default_factory=list)

    def read(self) -> tuple[int, dict[str, str], bytes, list[tuple[int, int]]]:
        """Return status, headers, body, and (end of a piece in the body, when it came) in order."""
        raw = b"".join(piece for _, piece in self.pieces)
        head, _, rest = raw.partition(_HEAD_END)
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        ends, marks = 0, []
        for came_ns, piece in self.pieces:
            ends += len(piece)
            marks.append((ends - len(head) - len(_HEAD_END), came_ns))
        status = int(first.split(" ")[1])
        if headers.get("transfer-encoding") != "chunked":
            return status, headers, rest, marks
        body, marks = _unchunk(rest, marks)
        return status, headers, body, marks

    def events(self) -> list[tuple[int, bytes]]:
        """Return the events of a stream with the moment at which each was complete."""
        _, _, body, marks = self.read()
        ends = [end for end, _ in marks]
        found, at = [], 0
        while (end := body.find(b"\n\n", at)) >= 0:
            number = min(bisect_left(ends, end + 2), len(marks) - 1)
            found.append((marks[number][1], body[at:end]))
            at = end + 2
        return found

    @property
    def ended_ns(self) -> int:
        """When the last byte came."""
        return self.pieces[-1][0]


def _unchunk(raw: bytes, marks: Sequence[tuple[int, int]]) -> tuple[bytes, list[tuple[int, int]]]:
    """Take the framing out of a chunked body; a piece that ends inside a chunk keeps its mark."""
    ends = [end for end, _ in marks]
    pieces: list[bytes] = []
    found: list[tuple[int, int]] = []
    size = at = 0
    while True:
        line_end = raw.index(b"\r\n", at)
        length = int(raw[at:line_end].split(b";")[0], 16)
        if not length:
            return b"".join(pieces), found
        at = line_end + 2
        pieces.append(raw[at : at + length])
        for number in range(bisect_left(ends, at + 1), len(ends)):
            end = min(ends[number], at + length)
            found.append((size + end - at, marks[number][1]))
            if end == at + length:
                break
        size += length
        at += length + 2


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None
        self._until: int | None = None  # bytes of a whole answer, once its head says so
        self._size = 0
        self._head = b""
        self._tail = b""

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to the server of a URL."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, parts.hostname or "", parts.port or 80)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> Answer:
        """Send a whole HTTP request; return its answer when the last byte is there."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._until, self._size, self._head, self._tail = None, 0, b"", b""
        self._answer = Answer(time.monotonic_ns())
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        came_ns = time.monotonic_ns()
        answer, done = self._answer, self._done
        if answer is None or done is None or done.done():
            return
        answer.pieces.append((came_ns, data))
        self._size += len(data)
        self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        if self._until is None:
            self._head += data
            self._read_head()
        if self._until == self._size or (self._until == -1 and self._tail == _LAST_CHUNK):
            done.set_result(answer)

    def _read_head(self) -> None:
        head, end, _ = self._head.partition(_HEAD_END)
        if not end:
            return
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self._until = len(head) + len(_HEAD_END) + int(value)
                return
        self._until = -1

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(UnavailableError(f"the server closed the connection: {error}"))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


def post(url: str, path: str, body: object) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    data = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: keep-alive\r\n\r\n"
    )
    return head.encode() + data
