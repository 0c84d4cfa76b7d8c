"""The error tree of every process, and its form on the wire and in HTTP answers.

Raise the narrowest class; carry the offending value, where it stood and the limit in the message.
Knows nothing of stages, sockets or HTTP servers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it travels between processes; `status` is the HTTP status a client will see."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def to_openai(self) -> dict[str, Any]:
        """Return the body that OpenAI clients expect for this error."""
        kind = "invalid_request_error" if 400 <= self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        if self.status == 401:
            kind = "authentication_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class TransomError(Exception):
    """Base of all errors that transom raises on purpose."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """Return the wire form."""
        return ErrorInfo(
            status=self.status,
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class ConfigError(TransomError):
    """A setting is unknown, unparsable or out of range; the process must not start."""

    code = "config_error"


class CheckpointError(TransomError):
    """A model folder is incomplete or does not fit its config; lists every problem at once."""

    code = "checkpoint_error"


class ProtocolError(TransomError):
    """A peer sent something outside the wire protocol; the message is dropped and counted."""

    code = "protocol_error"


class RequestError(TransomError):
    """The client's request is at fault: a 4xx that names the part, the value and the limit."""

    status = 400
    code = "invalid_request"


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit the model's context or the KV pools."""

    code = "context_length_exceeded"


class MediaError(RequestError):
    """A media item can't be fetched, decoded or accepted."""

    code = "invalid_media"


class AuthError(RequestError):
    """No or a wrong API key."""

    status = 401
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """An unknown model or path."""

    status = 404
    code = "not_found"


class PayloadTooLargeError(RequestError):
    """The request body is larger than the configured limit."""

    status = 413
    code = "payload_too_large"


class OverloadedError(TransomError):
    """A bounded queue is full; the client should come back after `retry_after_s`."""

    status = 429
    code = "overloaded"


class RateLimitError(TransomError):
    """An API key has used up what it may send; the client should come back after `retry_after_s`."""

    status = 429
    code = "rate_limit_exceeded"


class CancelledRequestError(TransomError):
    """The client went away; nobody reads the answer any more."""

    status = 499
    code = "cancelled"


class StageLostError(TransomError):
    """The process that held a part of the request died or became unreachable."""

    status = 502
    code = "stage_lost"


class UnavailableError(TransomError):
    """No ready worker of a needed stage, or the process is draining."""

    status = 503
    code = "unavailable"


class DeadlineError(TransomError):
    """The request's deadline passed before its answer was complete."""

    status = 504
    code = "deadline_exceeded"


_BY_CODE: dict[str, type[TransomError]] = {}


def _register(cls: type[TransomError]) -> None:
    _BY_CODE[cls.code] = cls
    for sub in cls.__subclasses__():
        _register(sub)


_register(TransomError)


def from_info(info: ErrorInfo) -> TransomError:
    """Rebuild the typed error that a peer reported; unknown codes become plain `TransomError`s."""
    cls = _BY_CODE.get(info.code, TransomError)
    error = cls(info.message, param=info.param, retry_after_s=info.retry_after_s)
    error.status = info.status
    error.code = info.code
    return error
