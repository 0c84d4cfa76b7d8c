"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: on two cores, threads that spin for each other cost more than they bring.
for _pool in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_pool, "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--disconnects", type=int, default=120, help="clients that go away in the process test (default 120)"
    )


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def shared_media() -> Path:
    """A folder of real media files beside the repository; skips the test where it is not laid."""
    folder = ROOT.parent / "shared" / "data" / "media"
    if not folder.is_dir():
        pytest.skip(f"no media files at {folder}")
    return folder
