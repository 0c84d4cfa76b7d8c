"""A page that a rank and the front both map: which pieces the rank is preparing right now.

Written by the rank, read by the front after the rank has died: memory outlives the process that wrote it,
a message that it still had to send does not. Loads no torch.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from transom.encoder.media.wire import MemoryFile

PREPARE_THREADS = 2
_IDLE = -1


class Progress:
    """One number for each preparing thread."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a page, or map that of a received descriptor and close it."""
        size_bytes = 8 * PREPARE_THREADS
        self.file: MemoryFile | None = None
        if fd is None:
            self.file = MemoryFile(size_bytes)
            self._slots = np.frombuffer(self.file.view, np.int64)
            self._slots[:] = _IDLE
        else:
            self._slots = np.frombuffer(mmap.mmap(fd, size_bytes), np.int64)
            os.close(fd)

    def begin(self, thread: int, number: int) -> None:
        """Note that a thread begins with a piece."""
        self._slots[thread] = number

    def end(self, thread: int) -> None:
        """Note that a thread is idle."""
        self._slots[thread] = _IDLE

    def current(self) -> set[int]:
        """Return the pieces that are being prepared."""
        return {int(number) for number in self._slots if number != _IDLE}

    def close(self) -> None:
        """Close the page's descriptor; the mapping goes with this object."""
        if self.file is not None:
            self.file.close()
