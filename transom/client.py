"""A small client of the chat API for our own commands: streaming answers, typed errors, media files.

Used by `transom chat`, `transom bench` and `transom up`; knows the public API only, no stage.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from transom.errors import ConfigError, RequestError, TransomError, UnavailableError
from transom.messages import Modality

_MIME = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp",
    ".gif": "image/gif", ".bmp": "image/bmp", ".avif": "image/avif", ".tif": "image/tiff",
    ".mp4": "video/mp4", ".m4v": "video/mp4", ".mov": "video/quicktime", ".webm": "video/webm",
    ".mkv": "video/x-matroska", ".ts": "video/mp2t", ".avi": "video/x-msvideo",
    ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg",
    ".opus": "audio/ogg", ".m4a": "audio/mp4", ".aac": "audio/aac",
}  # fmt: skip


@dataclass
class Answer:
    """What came back for one request. Times are seconds since the request was sent."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)  # of each piece of text
    e2e_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals_s[0] if self.arrivals_s else None


def media_part(path: str | Path, modality: Modality) -> dict[str, Any]:
    """Return the content part for a local file, inlined as a data: URL."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{modality} file {path}: {error.strerror or error}") from None
    return inline_part(data, _MIME.get(path.suffix.lower(), f"{modality}/*"), modality)


def inline_part(data: bytes, mime: str, modality: Modality) -> dict[str, Any]:
    """Return the content part for media bytes."""
    kind = f"{modality}_url"
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": kind, kind: {"url": url}}


class ChatClient:
    """A connection pool to one server; use as an async context manager."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> ChatClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1024 * 1024,  # a line of the event stream must fit
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the ids that the server serves; at least one."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                body = await _body(response)
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{self._url}: {why(error)}") from None
        names = [str(row["id"]) for row in body["data"]]
        if not names:
            raise UnavailableError(f"{self._url} serves no model")
        return names

    async def stream(self, body: dict[str, Any], answer: Answer) -> AsyncIterator[str]:
        """Send a chat, or a completion if it has a prompt; yield text as it arrives and fill `answer`."""
        route = "completions" if "prompt" in body else "chat/completions"
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        try:
            async with self._session.post(f"{self._url}/v1/{route}", json=body) as response:
                if response.status != 200:
                    await _body(response)
                async for event in _events(response):
                    piece = _take(event, answer)
                    if piece:
                        answer.arrivals_s.append(time.perf_counter() - begin)
                        answer.text += piece
                        yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"{self._url}: {why(error)}") from None
        finally:
            answer.e2e_s = time.perf_counter() - begin


def why(error: Exception) -> str:
    """Say why there is no answer: of a connection that failed what the system says, without its number."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    if isinstance(cause, OSError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)  # asyncio's own text repeats the address
    return str(getattr(cause, "strerror", None) or error or type(error).__name__)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream; raise when it ends before `[DONE]`."""
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield orjson.loads(data)
    raise UnavailableError("the answer's stream broke off before its end")


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Note an event in `answer`; return its text."""
    if "error" in event:
        raise _error(502, event)
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return ""


async def _body(response: aiohttp.ClientResponse) -> dict[str, Any]:
    raw = await response.read()
    try:
        body = orjson.loads(raw)
        if not isinstance(body, dict):
            raise ValueError(body)
    except ValueError:
        text = raw[:200].decode("utf-8", "replace")
        raise UnavailableError(f"HTTP {response.status}, not JSON: {text!r}") from None
    if response.status != 200:
        raise _error(response.status, body)
    return body


def _error(status: int, body: dict[str, Any]) -> TransomError:
    detail = body.get("error")
    detail = detail if isinstance(detail, dict) else {"message": str(detail)}
    message = f"HTTP {status}: {detail.get('message')}"
    error = (RequestError if status < 500 else TransomError)(message, param=detail.get("param"))
    error.status = status
    error.code = str(detail.get("code"))
    return error
