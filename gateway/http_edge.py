"""HTTP manners of the gateway: keys and their limits, CORS, and every error in OpenAI's shape.

Knows nothing of what the endpoints do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import orjson
from aiohttp import web

from transom.errors import (
    CancelledRequestError,
    ErrorInfo,
    StageLostError,
    TransomError,
)
from transom.gateway import playground
from transom.gateway.api_keys import ApiKey, ApiKeys
from transom.gateway.endpoints import ENDPOINTS
from transom.gateway.http_body import ENCODINGS
from transom.gateway.quota import LIMIT_HEADERS, Quotas

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The page is open so that a browser can ask for the key; it holds nothing that is not in the source.
_OPEN_PATHS = frozenset({one.path for one in ENDPOINTS if one.open} | set(playground.PATHS))
_LIMITED_PATHS = frozenset(one.path for one in ENDPOINTS if one.body is not None)
# Of the request that the present task answers.
_KEY: ContextVar[ApiKey | None] = ContextVar("api_key", default=None)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a JSON answer."""
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json", headers=headers
    )


def error_response(info: ErrorInfo, request_id: str | None = None) -> web.Response:
    """Return an error as OpenAI clients expect it."""
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(info.retry_after_s)))
    if info.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if info.code == StageLostError.code:
        # What may have killed a worker must not reach the next one by a client that retries by itself.
        headers["X-Should-Retry"] = "false"
    if info.status == 415:
        headers["Accept-Encoding"] = ", ".join(ENCODINGS)
    return json_response(info.to_openai(), status=info.status, headers=headers)


def api_key() -> ApiKey:
    """Return the key with which the request came that this task answers."""
    key = _KEY.get()
    assert key is not None
    return key


def middlewares(keys: ApiKeys, quotas: Quotas, cors_origins: tuple[str, ...]) -> list[Any]:
    """Return the application's middlewares, outermost first."""

    @web.middleware
    async def cors(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        allowed = origin is not None and _is_allowed(origin, cors_origins)
        preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not allowed:
            return await handler(request)
        response: web.StreamResponse = web.Response(status=204) if preflight else await handler(request)
        # A stream that has begun got its headers from the handler, see cors_headers.
        if not response.prepared:
            response.headers.update(cors_headers(request, cors_origins))
        return response

    @web.middleware
    async def limits(request: web.Request, handler: Handler) -> web.StreamResponse:
        _KEY.set(None)
        response = await errors(request, handler)
        if not response.prepared:
            response.headers.update(limit_headers(request, quotas))
        return response

    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path in _OPEN_PATHS:
                return await handler(request)
            key = keys.find(request)
            _KEY.set(key)
            if request.path not in _LIMITED_PATHS:
                return await handler(request)
            with quotas.hold(key):
                return await handler(request)
        except CancelledRequestError as error:
            logger.info("%s %s: %s", request.method, _shown(request), error.message)
            return error_response(error.info())
        except TransomError as error:
            if error.status >= 500:
                logger.warning("%s %s %d: %s", request.method, _shown(request), error.status, error.message)
            return error_response(error.info())
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = error_response(_plain_info(request, error))
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            return response
        except ConnectionError:
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, _shown(request))
            info = ErrorInfo(status=500, code="internal_error", message="internal error")
            return error_response(info)

    return [cors, limits]


def limit_headers(request: web.Request, quotas: Quotas) -> dict[str, str]:
    """Return what the client is told of its key's limits; nothing where none apply."""
    key = _KEY.get()
    return {} if key is None or request.path not in _LIMITED_PATHS else quotas.headers(key)


def _shown(request: web.Request) -> str:
    """Return the path as it was sent: decoded, it could hold line breaks and forge log lines.

    Bytes that are no ASCII, which no client should send, are shown as escapes: JSON can't hold them.
    """
    return request.raw_path[:200].encode("ascii", "backslashreplace").decode()


def _plain_info(request: web.Request, error: web.HTTPException) -> ErrorInfo:
    known = {404: "no such path", 405: "this method is not allowed here"}
    text = known.get(error.status, error.reason)
    return ErrorInfo(
        status=error.status,
        code="not_found" if error.status == 404 else "invalid_request",
        message=f"{request.method} {_shown(request)}: {text}",
    )


def _is_allowed(origin: str, cors_origins: tuple[str, ...]) -> bool:
    """Whether pages of an origin may call. What is sent back to it must be fit for a header."""
    return ("*" in cors_origins and origin.isascii()) or origin in cors_origins


def cors_headers(request: web.Request, cors_origins: tuple[str, ...]) -> dict[str, str]:
    """Return the headers that let a page of an allowed origin read the answer."""
    origin = request.headers.get("Origin")
    if origin is None or not _is_allowed(origin, cors_origins):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": "Authorization, Content-Type",
        "Access-Control-Expose-Headers": f"X-Request-Id, Retry-After, {', '.join(LIMIT_HEADERS)}",
        "Vary": "Origin",
    }
