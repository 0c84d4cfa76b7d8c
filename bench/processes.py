"""Child processes of a benchmark: started until they say that they are ready, their CPU time, their end.

Linux only: CPU time is read from /proc, for all processes of the child's session together.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from transom.errors import UnavailableError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Child:
    """A process with a session of its own; use as a context manager. `line` is its readiness object.

    With `ready` off nothing is read from it; whoever starts it finds out whether it serves.
    """

    def __init__(
        self, argv: Sequence[str], *, log: IO[bytes], ready: bool = True, limit_s: float = 60.0
    ) -> None:
        self.line: dict[str, Any] = {}
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if ready else log,
            stderr=log,
            start_new_session=True,
        )
        if not ready:
            return
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            while not self.line:
                raw = self._process.stdout.readline()
                if not raw:
                    raise UnavailableError(f"{' '.join(argv[:4])} ended before it was ready")
                if raw.startswith(b"{"):
                    self.line = orjson.loads(raw)
        except BaseException:
            self.stop()
            raise
        finally:
            timer.cancel()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the CPU time of the session so far."""
        ticks = 0
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    text = (folder / "stat").read_bytes()
                except OSError:
                    continue
                # The name in parentheses may hold anything; the fields after it are numbers.
                fields = text.rpartition(b")")[2].split()
                if int(fields[3]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS_PER_S

    def stop(self) -> None:
        """End it: gently, then not."""
        for number, limit_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    continue
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
