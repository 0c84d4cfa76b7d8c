"""Rebuild an arena's books from its entry records, and check that they are right.

Any process that maps an arena, under its lock: after a crash in the middle of a change, and when an
arena is attached again after all its processes ended. Knows no files and no locks.
"""

from __future__ import annotations

import numpy as np

from transom.shared_cache.extents import gaps
from transom.shared_cache.layout import (
    CLAIMED,
    COMMITTED,
    DETACHED,
    FREE,
    PROCESSES,
    DamagedRecordError,
    Record,
    Tables,
    Word,
)
from transom.shared_cache.ledger import Ledger


def rebuild(ledger: Ledger) -> bool:
    """Make index, free extents and counts follow from the sound records again.

    Unsound entries go. Returns False, with the books still wrong, when a living process leases an
    entry whose record is unsound: nobody knows which pages it reads.
    """
    tables = ledger.tables
    for process in range(PROCESSES):
        owner = int(tables.processes["pid"][process])
        if not owner or (process != ledger.me and not ledger.alive(process)):
            tables.leases[process] = 0
            tables.processes[process] = 0
    refs = tables.leases.sum(axis=0, dtype=np.uint32)
    tables.refs[:] = refs
    sound = _sound_records(tables)
    for slot in np.flatnonzero((tables.states != FREE) | (refs > 0)).tolist():
        if slot in sound:
            continue
        if refs[slot]:
            return False
        tables.states[slot] = FREE
    np.frombuffer(tables.index, np.uint32)[:] = 0
    # A committed entry wins over a claim, the older over the younger; there is one after a cut change.
    ranked = sorted(sound.items(), key=lambda item: (tables.states[item[0]] != COMMITTED, item[1].serial))
    for slot, record in ranked:
        if tables.states[slot] == DETACHED:
            continue
        if ledger.find(record.key) < 0:
            ledger.index_add(record.key, slot)
        elif refs[slot]:
            tables.states[slot] = DETACHED
        else:
            tables.states[slot] = FREE
            del sound[slot]
    ledger.extents.reset(_runs(list(sound.values())))
    words = tables.words
    for slot in sound:
        tables.owners[slot] = int(tables.leases[:, slot].argmax())
    tables.last_used[tables.last_used.argsort()] = np.arange(len(tables.last_used))
    words[Word.TICK] = len(tables.last_used)
    words[Word.SERIAL] = max((record.serial for record in sound.values()), default=0)
    words[Word.SLOT_HINT] = 0
    # Every entry's bytes are checked again before they are served.
    tables.verified[:] = 0
    tables.count(Word.GENERATION)
    return True


def _sound_records(tables: Tables) -> dict[int, Record]:
    """Return the records of live entries that are whole and whose pages nobody else has."""
    sound: dict[int, Record] = {}
    for slot in np.flatnonzero(tables.states).tolist():
        state = int(tables.states[slot])
        if state not in (CLAIMED, COMMITTED, DETACHED) or (state != COMMITTED and not tables.refs[slot]):
            continue
        try:
            record = tables.read(slot)
        except DamagedRecordError:
            continue
        if state != COMMITTED or record.pages:
            sound[slot] = record
    end, holder = 0, -1
    overlapping = set()
    for slot, record in sorted(sound.items(), key=lambda item: item[1].start_page):
        if record.pages and record.start_page < end:
            overlapping |= {holder, slot}
        if record.pages and record.start_page + record.pages > end:
            end, holder = record.start_page + record.pages, slot
    return {slot: record for slot, record in sound.items() if slot not in overlapping}


def _runs(records: list[Record]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    runs = [(record.start_page, record.pages) for record in records if record.pages]
    return np.array(sorted(runs), np.int64).reshape(-1, 2)


def check(ledger: Ledger) -> None:
    """Assert every invariant of the books (AssertionError names the first that fails)."""
    tables, words = ledger.tables, ledger.tables.words
    live = np.flatnonzero(tables.states != FREE).tolist()
    records = {slot: tables.read(slot) for slot in live}
    runs = _runs(list(records.values()))
    ends = runs[:, 0] + runs[:, 1]
    assert (ends[:-1] <= runs[1:, 0]).all(), "entries overlap"
    used, free = int(runs[:, 1].sum()), ledger.extents.free
    assert used == words[Word.USED_PAGES], f"{used} pages used, books say {words[Word.USED_PAGES]}"
    assert used + int(free[:, 1].sum()) == tables.geometry.pages, "free + used != capacity"
    assert np.array_equal(free, gaps(runs, tables.geometry.pages)), "free extents are not the gaps"

    index = np.frombuffer(tables.index, np.uint32)
    indexed = sorted((index[index > 0] - 1).tolist())
    assert indexed == [slot for slot in live if tables.states[slot] != DETACHED], "index is not complete"
    for slot in indexed:
        assert ledger.find(records[slot].key) == slot, f"entry {slot} can't be found under its key"

    refs = tables.leases.sum(axis=0, dtype=np.uint32)
    assert np.array_equal(refs, tables.refs), "reference counts are not the sums of the leases"
    for process in range(PROCESSES):
        owner = int(tables.processes["pid"][process])
        if owner:
            assert process == ledger.me or ledger.alive(process), f"process {owner} is dead"
        else:
            assert not tables.leases[process].any(), f"leases of empty process slot {process}"
    assert not refs[tables.states == FREE].any(), "a free entry is leased"
    for slot in live:
        state = int(tables.states[slot])
        if state == COMMITTED:
            assert records[slot].pages, f"committed entry {slot} has no pages"
        else:
            assert state in (CLAIMED, DETACHED), f"entry {slot} has state {state}"
            assert refs[slot], f"unpublished entry {slot} belongs to nobody"
