"""What an encoder and its fetch workers say to each other over a seqpacket socket.

Small msgspec structs; what was downloaded travels as a sealed memory file beside them.
"""

from __future__ import annotations

import socket

import msgspec

from transom.encoder.fetch import FetchLimits
from transom.encoder.known_urls import Validator
from transom.encoder.media.wire import receive_bytes


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The front's first word; fd: the limits, encoded. Answered by Ready or Unready."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Download a URL, unless its server says that it is still what is known. Answered once, by number."""

    number: int
    url: str
    known: Validator | None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this download any more; it needs no answer."""

    number: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Downloads can be taken."""


class Unready(msgspec.Struct, frozen=True, tag="unready"):
    """The settings are at fault; the worker ends."""

    message: str


class Got(msgspec.Struct, frozen=True, kw_only=True, tag="got"):
    """fd: the bytes, in memory that nobody can change any more."""

    number: int
    size_bytes: int
    validator: Validator | None


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged"):
    """The server says that it is still what was known."""

    number: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Nothing came of it. `is_media` tells whether the URL or its server is at fault."""

    number: int
    message: str
    is_media: bool = True


Order = Start | Fetch | Cancel
Answer = Ready | Unready | Got | Unchanged | Failed

_ENCODER = msgspec.msgpack.Encoder()
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_LIMITS = msgspec.msgpack.Decoder(FetchLimits)


def send(sock: socket.socket, message: Order | Answer, fd: int | None = None) -> None:
    """Send one message, with a file that the receiver gets a descriptor of."""
    socket.send_fds(sock, [_ENCODER.encode(message)], [] if fd is None else [fd])


def receive_order(sock: socket.socket, flags: int = 0) -> tuple[Order, int | None]:
    """Receive one message of the front; raise EOFError when it is gone."""
    data, fd = receive_bytes(sock, flags)
    return _ORDERS.decode(data), fd


def receive_answer(sock: socket.socket) -> tuple[Answer, int | None]:
    """Receive one message of a worker; raise EOFError when it is gone."""
    data, fd = receive_bytes(sock)
    return _ANSWERS.decode(data), fd


def encode_limits(limits: FetchLimits) -> bytes:
    """Return limits as they travel."""
    return _ENCODER.encode(limits)


def decode_limits(data: memoryview) -> FetchLimits:
    """Return the limits that came."""
    return _LIMITS.decode(data)
