"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from transom.kernels.native_ops import NativeOps
    from transom.kernels.triton_ops import TritonOps

# Before torch is imported: on two cores, threads that spin for each other cost more than they bring.
for _pool in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_pool, "1")

# A machine that stands still for a second is no fault of an example's.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Before anything imports triton, whose own functions read it then: without a GPU kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--disconnects", type=int, default=1000, help="clients that go away (default 1000)")


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


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The compiled CPU kernels; skips the test where there is no compiler."""
    from transom.kernels.native_build import Build, NoLibraryError, find_compiler

    try:
        find_compiler()
    except NoLibraryError as error:
        pytest.skip(str(error))
    return Build().wait(800)


@pytest.fixture(scope="session")
def native_ops(native_library: Path) -> NativeOps:
    from transom.kernels.native_ops import NativeOps

    return NativeOps(native_library, threads=1)


@pytest.fixture(scope="session")
def triton_ops() -> TritonOps:
    """The Triton kernels, on a GPU where there is one, else under the interpreter on the CPU."""
    import torch

    from transom.kernels.triton_ops import TritonOps

    return TritonOps(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
