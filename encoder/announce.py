"""Tells gateways that this encoder is there, again and again, and that it leaves.

Encoder process (front), event loop. A gateway that was restarted hears of the encoder within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from transom.errors import TransomError
from transom.messages import Join
from transom.transport import Transport

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0


class Announcer:
    """Runs from `start` to `leave`."""

    def __init__(self, transport: Transport, gateways: Sequence[str]) -> None:
        self._transport = transport
        self._gateways = gateways
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to announce."""
        if self._gateways:
            self._task = asyncio.create_task(self._repeat())

    async def _repeat(self) -> None:
        while True:
            self._tell(Join(address=self._transport.address))
            await asyncio.sleep(_INTERVAL_S)

    def _tell(self, message: Join) -> None:
        for gateway in self._gateways:
            try:
                self._transport.send(gateway, message)
            except TransomError as error:
                logger.warning("can't announce to %s: %s", gateway, error.message)

    async def leave(self) -> None:
        """Say goodbye, once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self._tell(Join(address=self._transport.address, leaving=True))
