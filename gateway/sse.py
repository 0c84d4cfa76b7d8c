"""A server-sent event stream that starts late, never buffers without bound and gives up on stalled readers.

Used by the handlers of the gateway process; knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import orjson
from aiohttp import web

from transom.errors import CancelledRequestError

_KEEPALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Headers go out with the first write, so that an early failure can still be a plain HTTP error.

    A write waits while the client doesn't read; the socket's buffer is all that is held for it.
    """

    def __init__(
        self, request: web.Request, *, keepalive_s: float, write_timeout_s: float, headers: Mapping[str, str]
    ) -> None:
        self._request = request
        self._keepalive_s = keepalive_s
        self._write_timeout_s = write_timeout_s
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._last_write_s = time.monotonic()
        self.started = False
        self._writing = False

    def idle_s(self) -> float:
        """Return how long to wait for news before a keep-alive is due."""
        return max(0.0, self._last_write_s + self._keepalive_s - time.monotonic())

    async def keep_alive(self) -> None:
        """Write a comment line, which clients skip."""
        await self._write(_KEEPALIVE)

    async def send(self, events: Iterable[object]) -> None:
        """Write events, one JSON object each."""
        data = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
        if data:
            await self._write(data)

    def hang_up(self) -> bool:
        """End the connection if a write waits for the client; False when none does."""
        if self._writing and self._request.transport is not None:
            self._request.transport.abort()
        return self._writing

    async def finish(self) -> web.StreamResponse:
        """Write the end mark."""
        await self._write(_DONE)
        async with asyncio.timeout(self._write_timeout_s):
            await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        self._writing = True
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self.started:
                    self.started = True
                    await self._response.prepare(self._request)
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise CancelledRequestError(f"the client has not read for {self._write_timeout_s:g} s") from None
        except ConnectionError:
            raise CancelledRequestError("the client closed the connection") from None
        finally:
            self._writing = False
        self._last_write_s = time.monotonic()
