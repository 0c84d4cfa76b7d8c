"""Where everything lies in an arena: header, processes, entries, index, leases, free extents, data pages.

Any process that maps an arena. The entry records are the only authority: index, free extents, reference
counts and page counts follow from them and are rebuilt after a crash. Knows no locks and no files.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES: Final = 4096
PROCESSES: Final = 64
MIN_ARENA_BYTES: Final = 128 * 1024
_HEADER_BYTES: Final = 4096
_MAGIC: Final = int.from_bytes(b"TRSMEMBD", "little")
_LAYOUT_VERSION: Final = 1
# One entry per 16 KiB: an embedding is rarely smaller, and the tables stay under 2 % of the arena.
_BYTES_PER_ENTRY: Final = 16 * 1024
_MIN_ENTRIES: Final = 16
_MAX_ENTRIES: Final = 131_072

FREE: Final = 0
CLAIMED: Final = 1  # in the index; made by `owner`, seen by nobody
COMMITTED: Final = 2  # in the index; immutable
DETACHED: Final = 3  # not in the index; its pages are free once the last lease ends


class Word:
    """Numbers of the header's 64-bit words. The first seven never change and have a checksum."""

    MAGIC, VERSION, SIZE_BYTES, PAGE_SIZE, PAGES, ENTRIES, PROCESSES, STATIC_CRC = range(8)
    OWNER_PID, OWNER_START, GENERATION, DIRTY, TICK, SERIAL, SLOT_HINT = range(8, 15)
    FREE_EXTENTS, USED_PAGES = range(15, 17)
    HITS, MISSES, WAITS, INSERTIONS, EVICTIONS, EVICTED_BYTES = range(17, 23)
    REJECTED, TORN, TAKEOVERS, REPAIRS = range(23, 27)


# Body and checksum are written by one copy.
_BODY = struct.Struct("<16sQIIQIIQ")
_CRC = struct.Struct("<I")
_RECORD_BYTES: Final = 64
# What changes after an entry was written, one array a column: scans for victims touch little memory.
_COLUMNS: Final = (
    ("states", "<u4"),
    ("refs", "<u4"),
    ("owners", "<u4"),
    ("verified", "<u4"),
    ("last_used", "<u8"),
    ("expires_ns", "<u8"),
)
_COLUMNS_BYTES: Final = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)
_PROCESS = np.dtype([("pid", "<u8"), ("start", "<u8"), ("namespace", "<u8"), ("unused", "<u8")])


class Record(NamedTuple):
    """The part of an entry that its own checksum covers. `checksum` is that of data, meta and key."""

    key: bytes
    serial: int
    start_page: int
    pages: int
    data_bytes: int
    meta_bytes: int
    unused: int
    checksum: int


class DamagedRecordError(Exception):
    """An entry's record or its place in the index is not what was written."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and offsets of an arena, all derived from its size."""

    size_bytes: int
    entries: int
    index_slots: int
    processes_at: int
    records_at: int
    columns_at: int
    index_at: int
    leases_at: int
    extents_at: int
    data_at: int
    pages: int

    @classmethod
    def of_size(cls, size_bytes: int) -> Geometry:
        """Lay out an arena of at most `size_bytes`; ValueError when that holds no page."""
        if size_bytes < MIN_ARENA_BYTES:
            raise ValueError(f"arena of {size_bytes} bytes, at least {MIN_ARENA_BYTES}")
        entries = min(max(size_bytes // _BYTES_PER_ENTRY, _MIN_ENTRIES), _MAX_ENTRIES)
        index_slots = 1 << (2 * entries - 1).bit_length()
        sizes = (
            PROCESSES * _PROCESS.itemsize,
            entries * _RECORD_BYTES,
            entries * _COLUMNS_BYTES,
            index_slots * 4,
            PROCESSES * entries * 2,
            (entries + 1) * 8,
        )
        at = [_HEADER_BYTES]
        for size in sizes:
            at.append(_round_up(at[-1] + size, 64))
        data_at = _round_up(at.pop(), PAGE_BYTES)
        pages = (size_bytes - data_at) // PAGE_BYTES
        end = data_at + pages * PAGE_BYTES
        processes_at, records_at, columns_at, index_at, leases_at, extents_at = at
        return cls(
            end, entries, index_slots,
            processes_at, records_at, columns_at, index_at, leases_at, extents_at, data_at, pages,
        )  # fmt: skip


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _static_words(geometry: Geometry) -> tuple[int, ...]:
    return (
        _MAGIC,
        _LAYOUT_VERSION,
        geometry.size_bytes,
        PAGE_BYTES,
        geometry.pages,
        geometry.entries,
        PROCESSES,
    )


def read_geometry(header: bytes, file_bytes: int) -> Geometry | None:
    """Return the layout that a file's first bytes name, or None if they are no header of this version."""
    if len(header) < 8 * 8:
        return None
    words = struct.unpack_from("<8Q", header)
    size_bytes = words[Word.SIZE_BYTES]
    if zlib.crc32(header[: 7 * 8]) != words[Word.STATIC_CRC]:
        return None
    if words[Word.MAGIC] != _MAGIC or words[Word.VERSION] != _LAYOUT_VERSION:
        return None
    if not MIN_ARENA_BYTES <= size_bytes <= file_bytes:
        return None
    geometry = Geometry.of_size(size_bytes)
    return geometry if words[:7] == _static_words(geometry) else None


class Tables:
    """Typed views of a mapped arena."""

    def __init__(self, buffer: mmap.mmap | bytearray, geometry: Geometry) -> None:
        self.geometry = geometry
        self.buffer = buffer
        whole = memoryview(buffer)
        self.words = whole[:_HEADER_BYTES].cast("Q")
        records_end = geometry.records_at + geometry.entries * _RECORD_BYTES
        self._records = whole[geometry.records_at : records_end]
        self.index = whole[geometry.index_at : geometry.index_at + 4 * geometry.index_slots].cast("I")
        self.processes: NDArray[Any] = np.frombuffer(buffer, _PROCESS, PROCESSES, geometry.processes_at)
        self.states: NDArray[Any]
        self.refs: NDArray[Any]
        self.owners: NDArray[Any]
        self.verified: NDArray[Any]
        self.last_used: NDArray[Any]
        self.expires_ns: NDArray[Any]
        at = geometry.columns_at
        for name, kind in _COLUMNS:
            column = np.frombuffer(buffer, kind, geometry.entries, at)
            setattr(self, name, column)
            at += column.nbytes
        leases = np.frombuffer(buffer, "<u2", PROCESSES * geometry.entries, geometry.leases_at)
        self.leases: NDArray[Any] = leases.reshape(PROCESSES, geometry.entries)  # (processes, entries)
        extents = np.frombuffer(buffer, "<u4", 2 * (geometry.entries + 1), geometry.extents_at)
        self.extents: NDArray[Any] = extents.reshape(-1, 2)  # (free extents, [start, pages])

    def initialise(self) -> None:
        """Write the header of an arena whose bytes are all zero; it is valid from the last store on."""
        self.extents[0] = (0, self.geometry.pages)
        self.words[Word.FREE_EXTENTS] = 1
        static = _static_words(self.geometry)
        for number, value in enumerate(static):
            self.words[number] = value
        self.words[Word.STATIC_CRC] = zlib.crc32(struct.pack("<7Q", *static))

    def read(self, slot: int) -> Record:
        """Return an entry's record; DamagedRecordError if its checksum or its bounds are wrong."""
        at = slot * _RECORD_BYTES
        (crc,) = _CRC.unpack_from(self._records, at + _BODY.size)
        if zlib.crc32(self._records[at : at + _BODY.size]) != crc:
            raise DamagedRecordError(slot)
        record = Record(*_BODY.unpack_from(self._records, at))
        size_bytes = record.data_bytes + record.meta_bytes
        if record.start_page + record.pages > self.geometry.pages or size_bytes > record.pages * PAGE_BYTES:
            raise DamagedRecordError(slot)
        return record

    def write(self, slot: int, record: Record) -> None:
        """Replace an entry's record by one copy, which no signal handler of Python's can cut in two."""
        at = slot * _RECORD_BYTES
        body = _BODY.pack(*record)
        self._records[at : at + _BODY.size + 4] = body + _CRC.pack(zlib.crc32(body))

    def key(self, slot: int) -> bytes:
        """Return an entry's key without checking the record."""
        at = slot * _RECORD_BYTES
        return bytes(self._records[at : at + 16])

    def count(self, word: int, amount: int = 1) -> int:
        """Add to a header word and return the new value."""
        value = (self.words[word] + amount) & 0xFFFF_FFFF_FFFF_FFFF
        self.words[word] = value
        return value

    def offset_bytes(self, record: Record) -> int:
        """Return where an entry's data begin in the arena."""
        return self.geometry.data_at + record.start_page * PAGE_BYTES


def pages_for(size_bytes: int) -> int:
    """Return how many pages an entry takes; an empty one has a page too."""
    return max(1, -(-size_bytes // PAGE_BYTES))
