"""ZMQ transport of every process: one ROUTER inbox, one DEALER per peer, typed messages with raw frames.

A peer is named by its inbox address. Sends never block the event loop and are bounded in bytes per
peer; a lost connection is reported once, so that the owner can fail what depended on that peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from transom.curve import FleetKey, require_fleet_key
from transom.errors import OverloadedError, ProtocolError, StageLostError, UnavailableError
from transom.messages import MAX_FRAMES, Message, check_frames, decode_header, encode_header

logger = logging.getLogger(__name__)

Frame = bytes | bytearray | memoryview
_SMALL_FRAME_BYTES = 16 * 1024  # below this a copy costs less than zero-copy bookkeeping
_TAKEN_IN_A_ROW = 64  # messages, before others on the event loop get their turn
_DONT_WAIT = int(zmq.DONTWAIT)
_GRACE_S = 0.5
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True)
class Received:
    """One message from a peer. `frames` stay valid as long as they are referenced."""

    peer: str  # the sender's inbox address, as it claims (authenticated by CURVE only)
    message: Message
    frames: list[memoryview]


@dataclass(slots=True)
class _Outgoing:
    parts: list[Frame]
    size_bytes: int
    sent: asyncio.Future[None] | None = None


class _Peer:
    """The sending side towards one address: a bounded queue drained by one task."""

    def __init__(self, transport: Transport, address: str) -> None:
        self.address = address
        self.queued_bytes = 0
        self._transport = transport
        self._queue: deque[_Outgoing] = deque()
        self._wakeup = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._connected = asyncio.Event()
        self._closed = False
        self._socket = transport.make_dealer(address)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._socket.connect(address)
        # An empty context: a connection outlives the request during which it was made, and must not
        # log under that request's id.
        self._tasks = [
            asyncio.create_task(work, context=contextvars.Context())
            for work in (self._drain(), self._watch())
        ]

    def put(self, item: _Outgoing, limit_bytes: int) -> None:
        if self._closed:
            raise StageLostError("the connection to another worker is closed")
        if self._queue and self.queued_bytes + item.size_bytes > limit_bytes:
            logger.info("send queue to %s is full", self.address)
            raise OverloadedError(
                f"the send queue to another worker is full ({limit_bytes} bytes)", retry_after_s=1
            )
        self._queue.append(item)
        self.queued_bytes += item.size_bytes
        self._wakeup.set()

    async def wait_room(self, size_bytes: int, limit_bytes: int) -> None:
        while not self._closed and self._queue and self.queued_bytes + size_bytes > limit_bytes:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise StageLostError("the connection to another worker was lost")

    async def _drain(self) -> None:
        while True:
            while not self._queue:
                self._wakeup.clear()
                await self._wakeup.wait()
            if not self._connected.is_set():
                if not await self._until_connected():
                    self._transport.lose(self.address, "no connection")
                    return
            item = self._queue[0]
            await self._socket.send_multipart(item.parts, copy=item.size_bytes < _SMALL_FRAME_BYTES)
            # lose() may have emptied the queue while this send was under way.
            if self._queue and self._queue[0] is item:
                self._queue.popleft()
                self.queued_bytes -= item.size_bytes
            self._room.set()
            # It may hold leased memory, and the next message may be long in coming.
            del item

    async def _until_connected(self) -> bool:
        """Wait for the connection; False when it takes too long.

        A loop that stood still runs its timers before it reads its sockets: it looks again after them.
        """
        for limit_s in (self._transport.connect_timeout_s, _GRACE_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._connected.wait()
            if self._connected.is_set():
                return True
        return False

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
            elif kind == zmq.EVENT_DISCONNECTED:
                if self._connected.is_set():
                    self._transport.lose(self.address, "connection closed")
                    return
            elif kind in (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            ):
                logger.warning(
                    "handshake with %s failed: do both sides use the same fleet key?", self.address
                )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self.queued_bytes = 0
        self._room.set()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class Transport:
    """Owns the sockets of a process. All methods run on the event loop that called `start`."""

    def __init__(
        self,
        *,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str = "",
        key: FleetKey | None = None,
        send_buffer_bytes: int = 512 * 1024 * 1024,
        connect_timeout_s: float = 5.0,
    ) -> None:
        require_fleet_key(bind, key)
        self._bind = bind
        self._key = key
        self._limit_bytes = send_buffer_bytes
        self.connect_timeout_s = connect_timeout_s
        self.address = advertise
        self.protocol_errors: Counter[str] = Counter()
        self.on_peer_lost: Callable[[str], None] | None = None
        self._context = zmq.asyncio.Context()
        self._peers: dict[str, _Peer] = {}
        self._inbox: zmq.Socket[bytes] | None = None
        self._inbox_news = asyncio.Event()
        self._taken_in_a_row = 0
        self._authenticator: Any = None
        self._closing: set[_Peer] = set()

    async def start(self) -> str:
        """Bind the inbox; return the address that peers use."""
        # Not zmq.asyncio's: that spends more time on futures and events than a message takes to handle.
        inbox: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.ROUTER)
        inbox.setsockopt(zmq.ROUTER_HANDOVER, 1)
        inbox.setsockopt(zmq.MAXMSGSIZE, 4 * 1024**3)
        inbox.setsockopt(zmq.RCVHWM, 10_000)
        self._common_options(inbox, self._bind)
        if self._key is not None:
            self._authenticator = self._key.start_authenticator(self._context)
            self._key.secure_server(inbox)
        target = self._bind[:-1] + "*" if self._bind.endswith(":0") else self._bind
        try:
            inbox.bind(target)
        except zmq.ZMQError as error:
            inbox.close(linger=0)
            await self.close()
            raise UnavailableError(f"can't bind {self._bind}: {error.strerror}") from None
        self._inbox = inbox
        asyncio.get_running_loop().add_reader(int(inbox.getsockopt(zmq.FD)), self._inbox_changed, inbox)
        bound = inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        if not self.address:
            self.address = bound
        return self.address

    @staticmethod
    def _common_options(socket: Any, address: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, int("[" in address))

    def make_dealer(self, address: str) -> zmq.asyncio.Socket:
        """Return a DEALER fit to connect to `address`; it carries our own address as its identity."""
        socket = self._context.socket(zmq.DEALER)
        self._common_options(socket, address)
        socket.setsockopt(zmq.IDENTITY, self.address.encode())
        socket.setsockopt(zmq.SNDHWM, 64)
        # Nothing queues inside ZMQ for a peer that is not there: the bound queue is ours.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._key is not None:
            self._key.secure_client(socket)
        return socket

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            if self._inbox is None:
                raise RuntimeError("transport is not started")
            self._check_address(address)
            peer = self._peers[address] = _Peer(self, address)
        return peer

    def _check_address(self, address: str) -> None:
        """Refuse to connect out to anything that a fleet peer can't be."""
        parts = urlsplit(address)
        if parts.scheme not in ("tcp", "ipc"):
            raise ProtocolError(f"peer address {address!r}: scheme must be tcp or ipc")
        require_fleet_key(address, self._key)

    def send(self, address: str, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Queue a message; raise OverloadedError when the peer's queue is full.

        The frames must not change afterwards: large ones are sent without a copy.
        """
        item = self._outgoing(message, frames)
        self._peer(address).put(item, self._limit_bytes)

    async def send_wait(self, address: str, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Queue a message, waiting for room; raise StageLostError when the peer goes away meanwhile."""
        item = self._outgoing(message, frames)
        peer = self._peer(address)
        await peer.wait_room(item.size_bytes, self._limit_bytes)
        peer.put(item, self._limit_bytes)

    @staticmethod
    def _outgoing(message: Message, frames: Sequence[Frame]) -> _Outgoing:
        check_frames(message, [memoryview(f) for f in frames])
        parts: list[Frame] = [encode_header(message), *frames]
        return _Outgoing(parts, sum(memoryview(part).nbytes for part in parts))

    async def recv(self) -> Received:
        """Return the next valid message; invalid ones are counted per peer and dropped.

        One caller at a time.
        """
        assert self._inbox is not None
        while True:
            parts = await self._next_parts(self._inbox)
            peer = parts[0].bytes.decode("ascii", "replace")
            try:
                if not 2 <= len(parts) <= MAX_FRAMES:
                    raise ProtocolError(f"{len(parts)} frames, allowed 2 to {MAX_FRAMES}")
                message = decode_header(parts[1].buffer)
                frames = [part.buffer for part in parts[2:]]
                check_frames(message, frames)
            except ProtocolError as error:
                self.protocol_errors[peer] += 1
                logger.warning("dropped a message from %s: %s", peer, error.message)
                continue
            return Received(peer, message, frames)

    def _inbox_changed(self, inbox: zmq.Socket[bytes]) -> None:
        # Asking for events makes the descriptor quiet again: else the loop would spin until the next `recv`.
        inbox.getsockopt(zmq.EVENTS)
        self._inbox_news.set()

    async def _next_parts(self, inbox: zmq.Socket[bytes]) -> list[zmq.Frame]:
        self._taken_in_a_row += 1
        if self._taken_in_a_row >= _TAKEN_IN_A_ROW:
            self._taken_in_a_row = 0
            await asyncio.sleep(0)
        while True:
            # The descriptor tells of changes only: forget the last one before looking, not after.
            self._inbox_news.clear()
            try:
                parts = [inbox.recv(_DONT_WAIT, copy=False)]
            except zmq.Again:
                self._taken_in_a_row = 0
                await self._inbox_news.wait()
                continue
            while parts[-1].more:  # the parts of a message come together or not at all
                parts.append(inbox.recv(_DONT_WAIT, copy=False))
            return parts

    def lose(self, address: str, why: str) -> None:
        """Forget a peer after its connection ended; the next send to it connects anew."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return
        logger.info("lost %s: %s", address, why)
        # Closing a peer cancels the task that may be calling us, so it runs from the loop.
        self._closing.add(peer)
        asyncio.get_running_loop().call_soon(self._close_lost, peer)
        if self.on_peer_lost is not None:
            self.on_peer_lost(address)

    def _close_lost(self, peer: _Peer) -> None:
        self._closing.discard(peer)
        peer.close()

    def watch(self, address: str) -> None:
        """Connect to a peer now, so that its loss is noticed even before the first send."""
        self._peer(address)

    async def close(self) -> None:
        """Close all sockets; queued messages are dropped."""
        self.on_peer_lost = None
        # A socket that is still open would make the end of the context wait for ever.
        for peer in (*self._peers.values(), *self._closing):
            peer.close()
        self._peers.clear()
        self._closing.clear()
        if self._inbox is not None:
            asyncio.get_running_loop().remove_reader(int(self._inbox.getsockopt(zmq.FD)))
            self._inbox.close(linger=0)
            self._inbox = None
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all queued messages were given to the sockets, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for peer in list(self._peers.values()):
                    with contextlib.suppress(StageLostError):
                        await peer.wait_room(self._limit_bytes + 1, self._limit_bytes)
