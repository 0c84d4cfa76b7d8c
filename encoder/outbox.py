"""Messages to a worker process over its seqpacket socket: sending never blocks, what doesn't fit waits here.

Encoder process (front), event loop. Knows nothing of what is said.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from transom.encoder.media.wire import MemoryFile

logger = logging.getLogger(__name__)

M = TypeVar("M")


class Outbox(Generic[M]):
    """The sending half of a non-blocking socket. `send` puts one message and a descriptor into it."""

    def __init__(self, sock: socket.socket, send: Callable[[socket.socket, M, int | None], None]) -> None:
        self._sock = sock
        self._send = send
        self._waiting: deque[tuple[M, MemoryFile | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def put(self, message: M, file: MemoryFile | None = None) -> None:
        """Send a message, with a file that may be closed right after. Nothing when the other side is gone."""
        if self._closed:
            return
        if self._waiting:
            self._waiting.append((message, file and file.duplicate()))
            return
        try:
            self._send(self._sock, message, None if file is None else file.fd)
        except BlockingIOError:
            self._waiting.append((message, file and file.duplicate()))
            self._loop.add_writer(self._sock.fileno(), self._writable)
        except OSError as error:
            logger.debug("a worker is going: %s", error)

    def _writable(self) -> None:
        try:
            while self._waiting:
                message, file = self._waiting[0]
                self._send(self._sock, message, None if file is None else file.fd)
                self._waiting.popleft()
                if file is not None:
                    file.close()
        except BlockingIOError:
            return
        except OSError:
            self._drop_waiting()
        self._loop.remove_writer(self._sock.fileno())

    def _drop_waiting(self) -> None:
        for _, file in self._waiting:
            if file is not None:
                file.close()
        self._waiting.clear()

    def close(self) -> None:
        """Drop what waits. Call it before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_writer(self._sock.fileno())
            self._drop_waiting()
