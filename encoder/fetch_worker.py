"""The fetch worker process: downloads for its encoder, many at a time, on an event loop of its own.

What a hostile server's TLS, HTTP or DNS does to a library ends this process and nothing else. Loads no torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import sys

import uvloop

from transom.encoder import fetch_wire as wire
from transom.encoder.fetch import Fetched, Fetcher
from transom.encoder.media.wire import MemoryFile
from transom.encoder.off_loop import off_loop
from transom.errors import ConfigError, MediaError
from transom.log import setup_from_arguments

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class _Downloads:
    """Serves one front over one socket, which blocks for sending: the front never waits for us."""

    def __init__(self, sock: socket.socket, fetcher: Fetcher) -> None:
        self._sock = sock
        self._fetcher = fetcher
        self._running: dict[int, asyncio.Task[None]] = {}
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Download until the front goes away."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock.fileno(), self._readable)
        await self._over.wait()
        loop.remove_reader(self._sock.fileno())

    def _readable(self) -> None:
        try:
            while True:
                order, _ = wire.receive_order(self._sock, socket.MSG_DONTWAIT)
                if isinstance(order, wire.Fetch):
                    self._running[order.number] = asyncio.create_task(self._run(order))
                elif isinstance(order, wire.Cancel) and (task := self._running.get(order.number)):
                    task.cancel()
        except BlockingIOError:
            return
        except (EOFError, ConnectionResetError):
            self._over.set()

    async def _run(self, order: wire.Fetch) -> None:
        answer: wire.Answer
        file: MemoryFile | None = None
        try:
            fetched = await self._fetcher.fetch(order.url, order.known)
            if fetched is None:
                answer = wire.Unchanged(order.number)
            else:
                file, answer = await _packed(order.number, fetched)
        except MediaError as error:
            answer = wire.Failed(number=order.number, message=error.message)
        except Exception as error:
            logger.exception("a download failed")
            answer = wire.Failed(number=order.number, message=type(error).__name__, is_media=False)
        finally:
            del self._running[order.number]
        try:
            wire.send(self._sock, answer, None if file is None else file.fd)
        except (BrokenPipeError, ConnectionResetError):
            self._over.set()
        finally:
            if file is not None:
                file.close()


async def _packed(number: int, fetched: Fetched) -> tuple[MemoryFile, wire.Got]:
    size_bytes = len(fetched.data)
    file = await off_loop(size_bytes, MemoryFile.sealed, fetched.data)
    return file, wire.Got(number=number, size_bytes=size_bytes, validator=fetched.validator)


async def _serve(sock: socket.socket) -> int:
    start, fd = wire.receive_order(sock)
    assert isinstance(start, wire.Start)
    assert fd is not None
    with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as memory:
        limits = wire.decode_limits(memoryview(memory[:]))
    os.close(fd)
    try:
        fetcher = Fetcher(limits)
        await fetcher.start()
    except ConfigError as error:
        wire.send(sock, wire.Unready(error.message))
        return 1
    try:
        wire.send(sock, wire.Ready())
        await _Downloads(sock, fetcher).serve()
    finally:
        await fetcher.close()
    return 0


def _confine(parent: int) -> bool:
    """Die with the encoder, leave no core file; return False when it is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return os.getppid() == parent


def main() -> int:
    """Entry of the process: descriptor of the socket, pid of the encoder, how to log."""
    descriptor, parent = (int(value) for value in sys.argv[1:3])
    setup_from_arguments("fetcher", sys.argv[3:5])
    if not _confine(parent):
        return 0
    try:
        return uvloop.run(_serve(socket.socket(fileno=descriptor)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the front has gone
        return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Threads may hang in a name server or a file system that nobody waits for any more.
    os._exit(code)
