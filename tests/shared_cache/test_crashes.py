"""Processes killed at every line of a change, and at random under load; bytes damaged anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shared_cache.content import check, key_of, put
from transom.shared_cache.embedding_cache import ShmEmbeddingCache
from transom.shared_cache.layout import Geometry


def run_script(name: str, *arguments: str, repository: Path) -> str:
    command = [sys.executable, "-m", f"tests.shared_cache.{name}", *arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("scenario", "stride", "least"),
    [
        # Every line (stride 1) takes minutes; these strides have no common factor with any loop.
        ("put_with_eviction", 7, 60),
        ("take_over", 13, 20),
        ("claim_and_abandon", 11, 20),
        ("hit_and_release", 11, 15),
        ("attach_and_close", 13, 10),
    ],
)
def test_kill_at_each_line(scenario: str, stride: int, least: int, repository: Path, tmp_path: Path) -> None:
    kills = int(run_script("crash_points", str(tmp_path), scenario, str(stride), repository=repository))
    assert kills >= least


@pytest.mark.process
def test_random_kills_under_load(repository: Path, tmp_path: Path) -> None:
    summary = json.loads(run_script("hammer", str(tmp_path / "arena"), "60", "600", repository=repository))
    assert summary["kills"] == 60, summary
    assert min(summary["hits"], summary["evictions"]) >= 10, summary
    assert (summary["leases"], summary["processes"], summary["torn"]) == (0, 1, 0), summary
    assert summary["files"] == 1, summary


SIZE_BYTES = 160 * 1024
_TABLES = Geometry.of_size(SIZE_BYTES).data_at


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    damage=st.lists(
        st.tuples(
            st.one_of(st.integers(0, _TABLES - 1), st.integers(0, SIZE_BYTES - 1)), st.integers(1, 255)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_damaged_arena_gives_right_bytes_or_none(damage: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.unlink(missing_ok=True)
    keys = [key_of(number) for number in range(8)]
    cache = ShmEmbeddingCache(path, SIZE_BYTES)
    for key in keys:
        put(cache, key, 12_000)
    cache.close()
    content = bytearray(path.read_bytes())
    for at, flip in damage:
        content[at % len(content)] ^= flip
    path.write_bytes(content)
    cache = ShmEmbeddingCache(path, SIZE_BYTES)
    cache.check_integrity()
    for key in keys:
        lease = cache.get(key)
        if lease is not None:
            check(lease, key, 12_000)
            lease.release()
    for number in range(20):
        assert put(cache, key_of(number), 12_000)
    cache.check_integrity()
    cache.close()
