"""The cache in an arena: several handles, restarts, damaged bytes, lost processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.patience import PATIENCE_S
from tests.shared_cache.conftest import Opener
from tests.shared_cache.content import check, key_of, meta_of, put, rows_of
from transom.messages import TensorMeta
from transom.shared_cache.contract import ArenaError, Busy, Claim, EntryMeta, Lease
from transom.shared_cache.layout import PROCESSES, Geometry, Word

FILLED = np.frombuffer(bytes(range(200)) * 50, np.int32).reshape(-1, 4)  # 10 kB, a pattern to look for
FILLED_META = EntryMeta(TensorMeta("int32", FILLED.shape))


class Holder:
    """A process that attaches `cache`, does `body`, tells its variable `answer` and waits for a kill."""

    def __init__(self, path: Path, body: str) -> None:
        script = (
            "import os, signal\nfrom pathlib import Path\n"
            "from tests.shared_cache.content import *\n"
            "from transom.shared_cache.embedding_cache import ShmEmbeddingCache\n"
            f"cache = ShmEmbeddingCache(Path({str(path)!r}), 1 << 20)\nanswer = 0\n{body}\n"
            "print(answer, flush=True)\nsignal.pause()\n"
        )
        self.process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.answer = int(self.process.stdout.readline() or -1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_all_handles_see_the_same_pages(attach: Opener, tmp_path: Path) -> None:
    one, two = attach(), attach()
    assert one.put(key_of(0), FILLED_META, [FILLED])
    lease = two.get(key_of(0))
    assert lease is not None
    assert one.stats().leases == 1
    # A change in the file shows through the lease: nothing was copied.
    at = (tmp_path / "arena").read_bytes().index(FILLED.tobytes())
    with open(tmp_path / "arena", "r+b") as file:
        file.seek(at)
        file.write(b"\xff\xff\xff\xff")
    assert lease.array()[0, 0] == -1
    lease.release()
    assert one.stats().leases == 0


def test_view_keeps_the_lease_until_it_ends(attach: Opener) -> None:
    cache = attach()
    cache.put(key_of(0), FILLED_META, [FILLED])
    lease = cache.get(key_of(0))
    assert lease is not None
    part = lease.data[100:200]
    rows = lease.array()[3:]
    lease.release()
    assert cache.stats().leases == 1
    del part
    assert cache.stats().leases == 1
    del rows
    assert cache.stats().leases == 0


def test_closing_waits_for_the_last_view(attach: Opener) -> None:
    cache, other = attach(), attach()
    cache.put(key_of(0), FILLED_META, [FILLED])
    lease = cache.get(key_of(0))
    assert lease is not None
    rows = lease.array()
    cache.close()
    lease.release()
    assert other.stats().processes == 2
    np.testing.assert_array_equal(rows, FILLED)
    del rows
    assert other.stats().processes == 1
    with pytest.raises(ArenaError, match="after close"):
        cache.get(key_of(0))
    cache.close()


def test_sending_without_a_copy_keeps_the_lease(attach: Opener) -> None:
    cache = attach()
    rows = np.arange(100_000, dtype=np.int32).reshape(-1, 4)  # pyzmq copies small frames
    cache.put(key_of(0), EntryMeta(TensorMeta("int32", rows.shape)), [rows])
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://embeddings")
        receiver.connect("inproc://embeddings")
        lease = cache.get(key_of(0))
        assert lease is not None
        sender.send(lease.data, copy=False)
        lease.release()
        assert cache.stats().leases == 1
        assert receiver.recv() == rows.tobytes()
        deadline = time.monotonic() + 20
        while cache.stats().leases:  # pyzmq lets go of the buffer in a thread of its own
            assert time.monotonic() < deadline


def test_restart_finds_everything(attach: Opener) -> None:
    before = attach(4 << 20)
    keys = [key_of(number) for number in range(40)]
    assert all(put(before, key) for key in keys)
    unpublished = before.begin(key_of(99))
    assert isinstance(unpublished, Claim)
    unpublished.abandon()
    before.close()
    after = attach(4 << 20)
    after.check_integrity()
    for key in keys:
        lease = after.get(key)
        assert lease is not None
        check(lease, key)
    assert after.get(key_of(99)) is None
    assert after.stats().torn == 0


@pytest.mark.parametrize("where", [0, 5000, 9999])
def test_torn_entry_is_a_miss(attach: Opener, tmp_path: Path, where: int) -> None:
    cache = attach()
    cache.put(key_of(0), FILLED_META, [FILLED])
    put(cache, key_of(1))
    cache.close()
    path = tmp_path / "arena"
    content = bytearray(path.read_bytes())
    content[content.index(FILLED.tobytes()) + where] ^= 0x10
    path.write_bytes(content)
    cache = attach()
    assert cache.get(key_of(0)) is None
    whole = cache.get(key_of(1))
    assert whole is not None
    check(whole, key_of(1))
    stats = cache.stats()
    assert (stats.torn, stats.entries) == (1, 1)
    cache.check_integrity()
    assert cache.put(key_of(0), FILLED_META, [FILLED])
    assert cache.get(key_of(0)) is not None


def test_torn_entry_is_a_miss_for_its_first_reader_without_a_restart(attach: Opener, tmp_path: Path) -> None:
    cache = attach()
    cache.put(key_of(0), FILLED_META, [FILLED])
    at = (tmp_path / "arena").read_bytes().index(FILLED.tobytes())
    with open(tmp_path / "arena", "r+b") as file:
        file.seek(at + 77)
        file.write(b"\xee")
    found = cache.begin(key_of(0))
    assert isinstance(found, Claim)
    assert cache.stats().torn == 1


def test_torn_entry_stays_for_those_who_lease_it(attach: Opener, tmp_path: Path) -> None:
    cache = attach()
    cache.put(key_of(0), FILLED_META, [FILLED])
    found = cache.begin(key_of(1))
    assert isinstance(found, Claim)
    mine = found.publish(FILLED_META, [FILLED + 1])
    assert mine is not None
    with open(tmp_path / "arena", "r+b") as file:
        file.seek((tmp_path / "arena").read_bytes().index((FILLED + 1).tobytes()))
        file.write(b"\xee")
    used = cache.stats().used_bytes
    assert cache.get(key_of(1)) is None
    assert cache.stats().used_bytes == used
    cache.check_integrity()
    mine.release()
    assert cache.stats().used_bytes < used


def test_damaged_record_of_a_leased_entry_rests_the_arena(attach: Opener, tmp_path: Path) -> None:
    """Nobody knows which pages its reader uses, so nothing is written until the reader lets go."""
    one, two = attach(), attach()
    one.put(key_of(0), FILLED_META, [FILLED])
    put(one, key_of(1))
    begun = two.begin(key_of(3))
    assert isinstance(begun, Claim)
    lease = one.get(key_of(0))
    assert lease is not None
    array = lease.array()
    at = (tmp_path / "arena").read_bytes().index(bytes.fromhex(key_of(0)))
    with open(tmp_path / "arena", "r+b") as file:
        file.seek(at + 30)
        file.write(b"\xff\xff")
        file.seek(8 * Word.DIRTY)
        file.write(b"\x01")
    assert two.get(key_of(1)) is None
    assert begun.publish(FILLED_META, [FILLED]) is None
    for number in range(200):
        assert not put(two, key_of(number))
    assert two.stats().hits == 1
    np.testing.assert_array_equal(array, FILLED)
    del array
    lease.release()
    found = two.get(key_of(1))
    assert found is not None
    check(found, key_of(1))
    assert two.get(key_of(0)) is None
    assert put(two, key_of(2))
    two.check_integrity()


def test_dead_process_loses_leases_and_claims(attach: Opener, tmp_path: Path) -> None:
    cache = attach()
    put(cache, key_of(0))
    body = (
        "lease = cache.get(key_of(0))\nclaims = [cache.begin(key_of(n)) for n in (1, 2)]\n"
        "rows = rows_of(key_of(2)); view = claims[1].reserve(meta_of(key_of(2), rows))"
    )
    with Holder(tmp_path / "arena", body) as child:
        busy = cache.begin(key_of(1))
        assert isinstance(busy, Busy)
        assert busy.pid == child.process.pid
        assert cache.stats().leases == 3
        child.kill()
        claim = cache.begin(key_of(1))
        assert isinstance(claim, Claim)
        stats = cache.stats()
        assert (stats.takeovers, stats.processes, stats.leases) == (1, 1, 1)
        assert isinstance(cache.begin(key_of(2)), Claim)
        cache.check_integrity()


def test_zombie_counts_as_dead(attach: Opener, tmp_path: Path) -> None:
    cache = attach()
    with Holder(tmp_path / "arena", "claim = cache.begin(key_of(1))") as child:
        os.kill(child.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
        assert isinstance(cache.begin(key_of(1)), Claim)


def test_child_of_a_dead_process_does_not_stand_in_for_it(attach: Opener, tmp_path: Path) -> None:
    cache = attach()
    body = "claim = cache.begin(key_of(1))\nanswer = os.fork()\nif not answer: signal.pause()"
    with Holder(tmp_path / "arena", body) as child:
        # The fork shares the open file, so the kernel's lock outlives the process that took it.
        try:
            assert isinstance(cache.begin(key_of(1)), Busy)
            child.kill()
            assert isinstance(cache.begin(key_of(1)), Claim)
        finally:
            os.kill(child.answer, signal.SIGKILL)


def test_forked_child_can_not_use_the_handle(attach: Opener, tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from transom.shared_cache.contract import ArenaError\n"
        "from transom.shared_cache.embedding_cache import ShmEmbeddingCache\n"
        f"cache = ShmEmbeddingCache(Path({str(tmp_path / 'arena')!r}), 1 << 20)\n"
        "pid = os.fork()\n"
        "if pid:\n    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "try:\n    cache.get('0' * 32)\nexcept ArenaError:\n    os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
    attach().check_integrity()


def test_arena_in_use_keeps_its_size(attach: Opener, caplog: pytest.LogCaptureFixture) -> None:
    first = attach(1 << 20)
    with caplog.at_level(logging.WARNING):
        second = attach(4 << 20)
    assert second.capacity_bytes == first.capacity_bytes
    assert "in use with" in caplog.text
    put(first, key_of(0))
    first.close()
    second.close()
    third = attach(4 << 20)
    assert third.capacity_bytes > 3 << 20
    assert third.get(key_of(0)) is None


def test_last_process_removes_an_arena_that_is_not_kept(attach: Opener, tmp_path: Path) -> None:
    one, two = attach(keep=False), attach(keep=False)
    one.close()
    assert (tmp_path / "arena").exists()
    two.close()
    assert not (tmp_path / "arena").exists()


def test_arena_goes_though_a_closed_process_still_reads_it(attach: Opener, tmp_path: Path) -> None:
    one, two = attach(keep=False), attach(keep=False)
    put(one, key_of(0))
    lease = one.get(key_of(0))
    assert lease is not None
    two.close()
    one.close()
    assert not (tmp_path / "arena").exists()
    new = attach()
    assert new.get(key_of(0)) is None
    check(lease, key_of(0))
    lease.release()
    assert (tmp_path / "arena").exists()


def test_processes_that_exit_with_leases_leave_nothing(tmp_path: Path) -> None:
    """Both close while they lease an entry and never let go of it: the last to exit takes the arena along."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.shared_cache.content import key_of, put\n"
        "from transom.shared_cache.embedding_cache import ShmEmbeddingCache\n"
        "cache = ShmEmbeddingCache(Path(sys.argv[1]), 1 << 20, keep=False)\n"
        "put(cache, key_of(0))\n"
        "sys.held = cache.get(key_of(0))\n"
        "print('leased', flush=True)\n"
        "sys.stdin.readline()\n"
        "cache.close()\n"
        "print('closed', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "arena")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for said in ("leased\n", "closed\n"):
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == said
        assert (tmp_path / "arena").exists()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    for process in processes:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert not (tmp_path / "arena").exists()


def test_file_is_private_and_others_are_refused(attach: Opener, tmp_path: Path) -> None:
    attach().close()
    path = tmp_path / "arena"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == Geometry.of_size(1 << 20).size_bytes <= 1 << 20
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # all pages are there
    path.chmod(0o644)
    with pytest.raises(ArenaError, match="not a private file"):
        attach()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaError, match="can't open"):
        attach()
    assert not (tmp_path / "elsewhere").exists()


def test_foreign_or_half_made_file_is_made_anew(attach: Opener, tmp_path: Path) -> None:
    for junk in (b"", b"x" * 100, b"y" * 300_000, bytes(1 << 20)):
        (tmp_path / "arena").write_bytes(junk)
        (tmp_path / "arena").chmod(0o600)
        cache = attach()
        assert put(cache, key_of(1))
        cache.check_integrity()
        cache.close()


def test_process_slots_are_bounded(attach: Opener) -> None:
    caches = [attach() for _ in range(PROCESSES)]
    with pytest.raises(ArenaError, match="process slots"):
        attach()
    caches[5].close()
    put(attach(), key_of(0))
    caches[0].check_integrity()


def test_full_of_leases_gives_claims_that_keep_nothing(attach: Opener) -> None:
    cache = attach()
    leases = []
    for number in range(1000):
        found = cache.begin(key_of(number))
        assert isinstance(found, Claim)
        rows = rows_of(key_of(number), 1000)
        lease = found.publish(meta_of(key_of(number), rows), [rows])
        if lease is None:
            break
        leases.append(lease)
    assert len(leases) == cache.stats().entries == Geometry.of_size(1 << 20).entries
    one, two = cache.begin(key_of(1001)), cache.begin(key_of(1001))
    assert isinstance(one, Claim)
    assert isinstance(two, Claim)
    assert one.reserve(FILLED_META) is None
    for number, lease in enumerate(leases):
        check(lease, key_of(number), 1000)
        lease.release()
    cache.check_integrity()
    assert put(cache, key_of(1001))


def test_two_at_once_encode_once(attach: Opener) -> None:
    one, two = attach(), attach()
    claim = one.begin(key_of(0))
    assert isinstance(claim, Claim)
    assert isinstance(two.begin(key_of(0)), Busy)
    claim.publish(FILLED_META, [FILLED])
    assert isinstance(two.begin(key_of(0)), Lease)
    assert one.stats().waits == 1
