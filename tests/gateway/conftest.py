"""What the gateway's tests share: the demo model's tokenizer and a gateway with scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from tests.gateway.fake_workers import ScriptedFleet, scripted_fleet
from transom.gateway.config import GatewayConfig
from transom.gateway.prepare import Model
from transom.tokenizer import Tokenizer

FleetFactory = Callable[..., Awaitable[ScriptedFleet]]


@pytest.fixture(scope="session")
def model() -> Model:
    return Model.load(GatewayConfig())


@pytest.fixture(scope="session")
def tokenizer(model: Model) -> Tokenizer:
    return model.tokenizer


@pytest.fixture
async def start_fleet(tokenizer: Tokenizer) -> AsyncIterator[FleetFactory]:
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> ScriptedFleet:
            return await stack.enter_async_context(scripted_fleet(tokenizer, **settings))

        yield start


@pytest.fixture
async def fleet(start_fleet: FleetFactory) -> ScriptedFleet:
    return await start_fleet()


@pytest.fixture
async def client(fleet: ScriptedFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk
