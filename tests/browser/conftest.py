"""A real browser, and the gateway with scripted workers that it looks at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Page, find_chromium, new_page, running_chromium
from tests.gateway.fake_workers import ScriptedFleet, scripted_fleet
from transom.gateway.config import GatewayConfig
from transom.gateway.prepare import Model
from transom.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a browser's DevTools; skips where no Chromium is installed."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no chromium on the PATH")
    with running_chromium(executable, tmp_path_factory.mktemp("chromium")) as devtools:
        yield devtools


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Model.load(GatewayConfig()).tokenizer


@pytest.fixture
async def fleet(tokenizer: Tokenizer) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tokenizer) as running:
        yield running


@pytest.fixture
async def page(chromium: str, fleet: ScriptedFleet) -> AsyncIterator[Page]:
    """The playground, loaded; the test fails if anything in it went wrong unseen."""
    async with new_page(chromium) as tab:
        await tab.open(fleet.url)
        await tab.until("document.querySelector('#readiness.ready')")
        yield tab
        assert tab.problems == []


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    from PIL import Image

    path = tmp_path / "shirt.png"
    Image.new("RGB", (96, 96), (40, 120, 110)).save(path)
    return path
