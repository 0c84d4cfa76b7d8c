"""What the gateway tells of an ended request beyond its own log and trace book: nothing, or spans.

Gateway process. Loads no OpenTelemetry unless it is switched on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from transom.config import telemetry_environment
from transom.errors import ConfigError
from transom.gateway.timeline import Timeline


@dataclass(slots=True)
class Observed:
    """What is known of a request when it has ended; `show` returns its trace once it was sent out."""

    timeline: Timeline
    show: Callable[[], dict[str, Any]] | None = None


class Telemetry(ABC):
    """Watches requests. Never blocks and never fails a request."""

    @abstractmethod
    def request(
        self, headers: Mapping[str, str], path: str, timeline: Timeline
    ) -> AbstractContextManager[Observed]:
        """Watch one request; what is yielded may be filled in meanwhile and is told of at the end."""

    @abstractmethod
    async def close(self) -> None:
        """Send what is left, within a bound."""


class NoTelemetry(Telemetry):
    """Switched off."""

    def request(
        self, headers: Mapping[str, str], path: str, timeline: Timeline
    ) -> AbstractContextManager[Observed]:
        return nullcontext(Observed(timeline))

    async def close(self) -> None:
        return None


def make_telemetry(*, otel: bool) -> Telemetry:
    """Return what the settings ask for; raise ConfigError when it isn't installed or set wrongly."""
    if not otel:
        return NoTelemetry()
    try:
        from transom.gateway.otel import SpanTelemetry
    except ImportError as error:
        missing = error.name or "opentelemetry"
        raise ConfigError(
            f"otel is on, but {missing} is not installed: pip install 'transom[otel]'"
        ) from None
    return SpanTelemetry(telemetry_environment())
