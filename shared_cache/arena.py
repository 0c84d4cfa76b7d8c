"""The arena file in /dev/shm: made with all its room, mapped, locked, repaired, given back.

Encoder processes. Every change happens in a section under the file's lock with a dirty flag set; whoever
comes after a holder that was killed rebuilds the books. Knows nothing of what entries hold.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from transom.shared_cache import repair
from transom.shared_cache.contract import ArenaError, ArenaSpaceError
from transom.shared_cache.layout import PROCESSES, Geometry, Tables, Word, read_geometry
from transom.shared_cache.ledger import Ledger
from transom.shared_cache.locks import ByteLocks, pid_namespace, process_start, supported

logger = logging.getLogger(__name__)

# Bytes of the file whose locks mean something; they lie in the header but the locks don't touch it.
MUTEX_BYTE = 0
FIRST_PROCESS_BYTE = 1
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
_HEADER_READ_BYTES = 64


class DamagedArenaError(ArenaError):
    """A living process leases an entry whose record is damaged: the arena rests until it lets go."""

    code = "arena_damaged"


class Arena:
    """A mapped arena in which this handle has a process slot. `section` guards the ledger."""

    def __init__(self, path: Path, fd: int, geometry: Geometry) -> None:
        self.path = path
        self.geometry = geometry
        self.mapping = mmap.mmap(fd, geometry.size_bytes)
        self.locks = ByteLocks(fd)
        self.pid = os.getpid()
        self.closing = False
        self.closed = False
        self.keep = True
        self.section = Section(self)
        self.thread_lock = threading.Lock()
        self.ended_leases: deque[int] = deque()
        self._fd = fd
        self._namespace = pid_namespace()
        self.ledger = Ledger(Tables(self.mapping, geometry), -1, self.alive)

    @classmethod
    def attach(cls, path: Path, size_bytes: int, *, keep: bool) -> Arena:
        """Open the arena at `path`, making it if need be, and take a process slot.

        A living arena keeps the size it has. Raises ArenaError; ArenaSpaceError when the file system
        has too little room. `keep` leaves the file when the last process closes it.
        """
        if not supported():
            raise ArenaError("this system has no open-file-description locks")
        while True:
            fd = _open_own_file(path)
            try:
                locks = ByteLocks(fd)
                locks.lock(MUTEX_BYTE)
                if not _still_at(path, fd):
                    os.close(fd)
                    continue
                geometry = _existing_or_new(path, fd, locks, size_bytes)
                arena = cls(path, fd, geometry)
            except BaseException:
                os.close(fd)
                raise
            try:
                arena.keep = keep
                arena._enter_processes()
                locks.unlock(MUTEX_BYTE)
            except BaseException:
                arena.unmap()
                raise
            return arena

    def _enter_processes(self) -> None:
        """Check the books, tidy after the dead and take a process slot (file lock held)."""
        ledger, words = self.ledger, self.ledger.tables.words
        cold = not self.locks.held_elsewhere(FIRST_PROCESS_BYTE, PROCESSES)
        if cold or words[Word.DIRTY]:
            self.recover()
        words[Word.DIRTY] = 1
        ledger.reap_dead()
        for slot in range(PROCESSES):
            processes = ledger.tables.processes
            if not processes["pid"][slot] and self.locks.try_lock(FIRST_PROCESS_BYTE + slot):
                break
        else:
            words[Word.DIRTY] = 0
            raise ArenaError(f"{self.path}: all {PROCESSES} process slots are in use")
        start = process_start(self.pid) or 0
        processes["start"][slot] = start
        processes["namespace"][slot] = self._namespace
        processes["pid"][slot] = self.pid
        ledger.me = slot
        if cold:
            words[Word.OWNER_PID], words[Word.OWNER_START] = self.pid, start
        words[Word.DIRTY] = 0

    def alive(self, slot: int) -> bool:
        """Tell whether the process that took a slot still runs.

        The kernel says whether its lock is held, across pid namespaces and after a reuse of its pid. A
        child that it forked may hold the lock on after its death; then its pid decides.
        """
        if not self.locks.held_elsewhere(FIRST_PROCESS_BYTE + slot):
            return False
        entry = self.ledger.tables.processes[slot]
        if int(entry["namespace"]) != self._namespace:
            return True
        return process_start(int(entry["pid"])) == int(entry["start"])

    def recover(self) -> None:
        """Rebuild the books (file lock held); DamagedArenaError when that has to wait."""
        words = self.ledger.tables.words
        crashed = bool(words[Word.DIRTY])
        words[Word.DIRTY] = 1
        if not repair.rebuild(self.ledger):
            raise DamagedArenaError(f"{self.path}: a damaged entry is leased")
        if crashed:
            self.ledger.tables.count(Word.REPAIRS)
            logger.warning("%s: rebuilt after a process died in the middle of a change", self.path)
        words[Word.DIRTY] = 0

    def end_lease(self, slot: int) -> None:
        """End one lease of ours, now or at the next section. Safe in a finalizer in any thread."""
        self.ended_leases.append(slot)
        # The finalizer may run in the middle of a section of this very thread.
        if os.getpid() != self.pid or self.closed or not self.thread_lock.acquire(blocking=False):
            return
        self.thread_lock.release()
        try:
            with self.section:
                pass
        except DamagedArenaError:
            return
        if self.closing:
            self.close()

    def close(self) -> None:
        """Give the process slot back and unmap, once no lease is left or at exit. Idempotent."""
        if self.closed:
            return
        with self.section as ledger:
            self._unlink_if_last()
            if ledger.tables.leases[ledger.me].any():
                if not self.closing:
                    atexit.register(self._leave)
                self.closing = True
                return
            self.closing = True
            ledger.reap(ledger.me)
            self.closed = True
            # Not only in `unmap`: of two processes that close at once the later must find itself the last.
            self.locks.unlock(FIRST_PROCESS_BYTE + ledger.me)
        del ledger  # its views of the mapping
        atexit.unregister(self._leave)
        self.unmap()

    def _unlink_if_last(self) -> None:
        """Take the name from an arena that nobody else has open (section held); the pages live on."""
        last = not self.locks.held_elsewhere(FIRST_PROCESS_BYTE, PROCESSES)
        if last and not self.keep and _still_at(self.path, self._fd):
            self.path.unlink()

    def _leave(self) -> None:
        """At exit, with views left that nobody will end: make way for another process to be the last."""
        if self.closed or os.getpid() != self.pid:
            return
        with contextlib.suppress(ArenaError), self.section as ledger:
            self._unlink_if_last()
            self.closed = True
            # The others end our leases, as if we had been killed.
            self.locks.unlock(FIRST_PROCESS_BYTE + ledger.me)

    def unmap(self) -> None:
        """Drop the mapping and the locks."""
        self.closed = True
        slot = self.ledger.me
        if slot >= 0:
            self.locks.unlock(FIRST_PROCESS_BYTE + slot)
        self.locks.unlock(MUTEX_BYTE)
        os.close(self._fd)
        del self.ledger
        # Closing is not possible in the finalizer of the last view; the mapping goes with it.
        with contextlib.suppress(BufferError):
            self.mapping.close()
        del self.mapping


class Section:
    """`with arena.section as ledger`: exclusive among all threads and processes; entered dirty.

    An exception that leaves a section, like a kill within it, makes the next one rebuild the books.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __enter__(self) -> Ledger:
        arena = self._arena
        arena.thread_lock.acquire()
        try:
            if arena.closed or os.getpid() != arena.pid:
                raise ArenaError(f"{arena.path}: used after close or in a forked process")
            arena.locks.lock(MUTEX_BYTE)
            try:
                self._prepare()
            except BaseException:
                arena.locks.unlock(MUTEX_BYTE)
                raise
        except BaseException:
            arena.thread_lock.release()
            raise
        return arena.ledger

    def _prepare(self) -> None:
        arena = self._arena
        ledger = arena.ledger
        words = ledger.tables.words
        if words[Word.DIRTY]:
            # Only the lease table is sure; the counts are made from it.
            while arena.ended_leases:
                ledger.tables.leases[ledger.me, arena.ended_leases.popleft()] -= 1
            arena.recover()
        words[Word.DIRTY] = 1
        while arena.ended_leases:
            ledger.unlease(arena.ended_leases.popleft())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        arena = self._arena
        try:
            if kind is None:
                arena.ledger.tables.words[Word.DIRTY] = 0
            arena.locks.unlock(MUTEX_BYTE)
        finally:
            arena.thread_lock.release()


def _open_own_file(path: Path) -> int:
    """Open or make the file, refusing what another user or a link put there."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ArenaError(f"can't open {path}: {error.strerror}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise ArenaError(
            f"{path} is not a private file of ours: mode {found.st_mode:o}, owner {found.st_uid}"
        )
    return fd


def _still_at(path: Path, fd: int) -> bool:
    """Tell whether the open file is the one at its path; a sweep may have removed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _existing_or_new(path: Path, fd: int, locks: ByteLocks, size_bytes: int) -> Geometry:
    """Return the layout of the file, which is made anew when it is void or nobody needs its size."""
    wanted = Geometry.of_size(size_bytes)
    existing = read_geometry(os.pread(fd, _HEADER_READ_BYTES, 0), os.fstat(fd).st_size)
    if existing == wanted:
        return existing
    if locks.held_elsewhere(FIRST_PROCESS_BYTE, PROCESSES):
        if existing is None:
            raise ArenaError(f"{path} has another layout and is in use")
        logger.warning("%s is in use with %d bytes; %d wanted", path, existing.size_bytes, size_bytes)
        return existing
    os.ftruncate(fd, 0)
    try:
        # Without all its pages a full file system would kill the process at a later store.
        os.posix_fallocate(fd, 0, wanted.size_bytes)
    except OSError as error:
        os.ftruncate(fd, 0)
        path.unlink(missing_ok=True)
        if error.errno not in _NO_ROOM:
            raise ArenaError(f"can't allocate {path}: {error.strerror}") from None
        free_bytes = _free_bytes(path.parent)
        raise ArenaSpaceError(
            f"{path.parent} has too little room for the arena: {wanted.size_bytes} bytes needed,"
            f" {free_bytes} free ({error.strerror}); with Docker raise --shm-size",
            need_bytes=wanted.size_bytes,
            free_bytes=free_bytes,
        ) from None
    with mmap.mmap(fd, wanted.size_bytes) as mapping:
        tables = Tables(mapping, wanted)
        tables.initialise()
        del tables
    return wanted


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
