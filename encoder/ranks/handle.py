"""The front's end of one rank process: its start, its socket, its death.

Encoder process (front), event loop. Knows nothing of pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from transom.encoder.media.wire import MemoryFile
from transom.encoder.outbox import Outbox
from transom.encoder.ranks import wire
from transom.encoder.ranks.progress import Progress

logger = logging.getLogger(__name__)

_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RankProcess:
    """One life of a rank. `on_answer` gets each message, `on_end` is called once when it is gone."""

    def __init__(
        self,
        start: wire.Start,
        *,
        log: Sequence[str],
        on_answer: Callable[[wire.Answer, int | None], None],
        on_end: Callable[[], None],
    ) -> None:
        self.progress = Progress()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "transom.encoder.ranks.process"]
            arguments = [str(theirs.fileno()), str(os.getpid()), *log]
            # Torch reads these at import; ranks that share cores must not spin on each other's.
            environment = os.environ | (dict.fromkeys(_POOLS, str(start.threads)) if start.threads else {})
            self.process = subprocess.Popen(
                command + arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
            )
        self._on_answer = on_answer
        self._on_end = on_end
        self._sock = ours
        self._sock.setblocking(False)
        self._outbox: Outbox[wire.Order] = Outbox(ours, wire.send)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._readable)
        self._ended = False
        self.send(start, self.progress.file)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, order: wire.Order, file: MemoryFile | None = None) -> None:
        """Send an order, with a file that may be closed right after. Nothing when the rank is gone."""
        self._outbox.put(order, file)

    def _readable(self) -> None:
        try:
            while not self._ended:
                self._on_answer(*wire.receive_answer(self._sock))
        except BlockingIOError:
            return
        except Exception as error:
            if not isinstance(error, (EOFError, OSError)):
                logger.exception("rank %d broke its protocol", self.pid)
            self._end()
            self._on_end()

    def kill(self) -> None:
        """End the process; `on_end` follows."""
        self.process.kill()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._sock.fileno())
            self._outbox.close()
            self._sock.close()
            self.progress.close()

    async def reap(self) -> int:
        """End the process if need be, release everything; return the exit code."""
        self._end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It has closed its socket: it is ending, and its own exit code says why.
            return await asyncio.to_thread(self.process.wait, 2.0)
        self.process.kill()
        return await asyncio.to_thread(self.process.wait)
