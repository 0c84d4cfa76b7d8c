"""Fixtures for the tests of the core: the tiny stage's command line, and a transport to talk to it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from transom.transport import Transport


@pytest.fixture(scope="session")
def tiny_stage() -> tuple[str, ...]:
    """The command of a real stage process without a model."""
    return (sys.executable, str(Path(__file__).parent / "tiny_stage.py"))


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    """A started transport of this process."""
    own = Transport()
    await own.start()
    yield own
    await own.close()
