"""Locks of the kernel on bytes of a file, and whether a process still lives.

Any process. Open-file-description locks: the kernel frees them when their holder dies, and two handles
in one process exclude each other, which POSIX record locks don't.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("@hhqqi4x")


def supported() -> bool:
    """Tell whether this system has such locks."""
    return hasattr(fcntl, "F_OFD_SETLKW")


class ByteLocks:
    """Exclusive locks on single bytes of one open file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _call(self, command: int, kind: int, first: int, count: int) -> bytes:
        return fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, first, count, 0))

    def lock(self, byte: int) -> None:
        """Wait for the lock; the calling thread lets go of the GIL."""
        self._call(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, byte, 1)

    def try_lock(self, byte: int) -> bool:
        """Take the lock if it is free."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte, 1)
        except BlockingIOError:
            return False
        return True

    def unlock(self, byte: int) -> None:
        """Let go of the lock."""
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte, 1)

    def held_elsewhere(self, first: int, count: int = 1) -> bool:
        """Tell whether another open file holds a lock in the range."""
        answer = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, first, count)
        return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold spaces and parentheses; the fields follow the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def pid_namespace() -> int:
    """Return what tells this process's pid namespace from others, as containers have their own."""
    return os.stat("/proc/self/ns/pid").st_ino
