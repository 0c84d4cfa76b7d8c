"""The HTTP listener of a process: aiohttp's server, whose own errors are JSON of OpenAI's shape too.

Every process. What is no HTTP never reaches the application: it is answered here, and none of it repeated.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from transom.errors import ErrorInfo, UnavailableError

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 8190  # of the request line, and of one header
_MAX_HEADERS = 128
_IDLE_S = 300.0  # between requests; above what proxies keep an idle connection for
_GRACE_S = 0.1
_NAME = "transom"


class _Connection(web.RequestHandler):
    """One client's connection. `head_timeout_s` is how long it may take over the head of a request."""

    __slots__ = ("_head_timeout_s", "_head_timer")

    def __init__(self, manager: web.Server, *, head_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request, but not for ever: that is aiohttp's rule for later ones alone."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun must come to its end."""
        super().data_received(data)
        if not self._is_idle():
            self._end_timer()
        elif self._head_timer is None:
            self._expect_head()

    def _is_idle(self) -> bool:
        """Whether a request is waited for: none is there, none is being answered."""
        return self._waiter is not None and not self._waiter.done()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let go of the timer."""
        self._end_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(self._head_timeout_s, self._look_again)

    def _look_again(self) -> None:
        # libuv runs timers before it reads sockets: after a stall of the loop the head may lie there unread.
        self._head_timer = asyncio.get_running_loop().call_later(_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        self.force_close()

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be read or failed outside of every handler, and close the connection."""
        if status < 500:
            # By its class alone: aiohttp's words repeat what was sent, and keys may be among it.
            logger.info("a client sent what is not HTTP (%s)", type(exc).__name__)
        else:
            logger.error("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if isinstance(exc, LineTooLong):
            text = f"the request line or a header is longer than {_MAX_LINE_BYTES} bytes, the limit"
        elif status < 500:
            text = (
                "this is not HTTP: the request line, a header or the body's framing is malformed,"
                f" or there are more than {_MAX_HEADERS} headers"
            )
        else:
            text = "internal error"
        response = _json_error(status, text)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; aiohttp's own refusals, which are plain text, become JSON."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = _json_error(resp.status, resp.reason)
        if not resp.prepared:
            _hide_versions(resp)
        return await super().finish_response(request, resp, start_time)


def _hide_versions(response: web.StreamResponse) -> None:
    """Leave out what aiohttp says of itself and of Python: whoever looks for known faults needn't be told."""
    response.headers["Server"] = _NAME


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    _hide_versions(response)  # of a stream, which handlers begin themselves


def _json_error(status: int, text: str) -> web.Response:
    code = "internal_error" if status >= 500 else "not_found" if status == 404 else "invalid_request"
    body = ErrorInfo(status=status, code=code, message=text).to_openai()
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


class HttpListener:
    """Serves one application at one address."""

    def __init__(self, app: web.Application, *, head_timeout_s: float) -> None:
        app.on_response_prepare.append(_on_prepare)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True)
        self._head_timeout_s = head_timeout_s
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; raise UnavailableError when the address can't be had."""
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        loop = asyncio.get_running_loop()

        def connection() -> _Connection:
            return _Connection(
                manager,
                head_timeout_s=self._head_timeout_s,
                loop=loop,
                access_log=None,
                keepalive_timeout=_IDLE_S,
                max_line_size=_MAX_LINE_BYTES,
                max_field_size=_MAX_LINE_BYTES,
                max_headers=_MAX_HEADERS,
                auto_decompress=False,  # whoever reads a body decodes it
            )

        try:
            self._listening = await loop.create_server(connection, host, port, backlog=128)
        except OSError as error:
            await self._runner.cleanup()
            raise UnavailableError(f"can't listen on {host}:{port}: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._listening is not None
        host, port = self._listening.sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        """Listen no more, end what is in work."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()
