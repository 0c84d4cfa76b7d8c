"""What an encoder's front and its ranks say to each other over a seqpacket socket.

Small msgspec structs; pixels, samples and embeddings travel as memory files beside them, so that nothing
large is ever copied through a socket. Loads no torch.
"""

from __future__ import annotations

import socket

import msgspec

from transom.encoder.media.wire import receive_bytes
from transom.messages import Dtype


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The front's first word; fd: the rank's progress page. Answered by Ready or Unready."""

    index: int
    folder: str
    device: str
    dtype: str
    threads: int


class Frames(msgspec.Struct, frozen=True, kw_only=True, tag="frames"):
    """Prepare a picture or a video unit; fd: uint8 (frames, height, width, 3), resized to `target` here."""

    number: int
    frames: int
    height: int
    width: int
    target: tuple[int, int]


class Sound(msgspec.Struct, frozen=True, kw_only=True, tag="sound"):
    """Prepare a segment of sound; fd: float32 (samples,). Its mel frames are [skip, skip + frames)."""

    number: int
    samples: int
    skip: int
    frames: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Embed these pieces together, all of one kind. Answered by Done, and by Rows or Failed for each."""

    numbers: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Nobody wants these pieces any more; those in a running forward are embedded all the same."""

    numbers: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The towers are loaded."""

    device: str
    dtype: Dtype


class Unready(msgspec.Struct, frozen=True, kw_only=True, tag="unready"):
    """The towers can't be loaded; the rank ends."""

    code: str
    message: str


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag="rows"):
    """A piece's embedding; fd: (rows, hidden) in the dtype of Ready. Times: the machine's monotonic clock."""

    number: int
    shape: tuple[int, int]
    prepared_s: tuple[float, float]
    forward_s: tuple[float, float]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """This piece alone could not be prepared or embedded. `is_media` tells whether its item is at fault."""

    number: int
    message: str
    is_media: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The device is free again; the rows of the batch follow. `pieces` were embedded, the others dropped."""

    pieces: int
    forward_s: tuple[float, float]


Order = Start | Frames | Sound | Forward | Drop
Answer = Ready | Unready | Rows | Failed | Done

_ENCODER = msgspec.msgpack.Encoder()
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(sock: socket.socket, message: Order | Answer, fd: int | None = None) -> None:
    """Send one message, with a file that the receiver gets a descriptor of."""
    socket.send_fds(sock, [_ENCODER.encode(message)], [] if fd is None else [fd])


def receive_order(sock: socket.socket) -> tuple[Order, int | None]:
    """Receive one message of the front; raise EOFError when it is gone."""
    data, fd = receive_bytes(sock)
    return _ORDERS.decode(data), fd


def receive_answer(sock: socket.socket) -> tuple[Answer, int | None]:
    """Receive one message of a rank; raise EOFError when it is gone."""
    data, fd = receive_bytes(sock)
    return _ANSWERS.decode(data), fd
