"""The accepted API keys with their limits, read once from a file.

Gateway process. Keys are kept as digests only; what names a key elsewhere is its label or its number.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from transom.errors import AuthError, ConfigError
from transom.gateway.admission import Caller

_MAX_LABELS = 64
_LABEL_CHARS = 64
OTHERS = "other"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may do; 0: no limit. `weight` is its share when requests wait for room."""

    requests_per_minute: int = 0
    max_inflight: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`number` counts from 1; 0 is everybody where no key is asked. `label` is what metrics say."""

    digest: bytes
    number: int
    label: str
    limits: KeyLimits

    @property
    def caller(self) -> Caller:
        """The key as admission sees it."""
        return Caller(str(self.number), self.limits.weight)


class ApiKeys:
    """All keys of a gateway; without any, everybody may call."""

    def __init__(self, keys: list[ApiKey], default: KeyLimits) -> None:
        self._keys = keys
        self.anybody = ApiKey(b"", 0, "anybody", default)

    @classmethod
    def from_file(cls, path: str, default: KeyLimits) -> ApiKeys:
        """Read one key a line, perhaps with `name=value` settings; blank lines and comments don't count."""
        if not path:
            return cls([], default)
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"API key file {path}: {error}") from None
        found: list[ApiKey] = []
        labels: set[str] = set()
        digests: set[bytes] = set()
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            label, limits = _settings(words[1:], default, f"API key file {path}, line {number}")
            labels.add(label)
            if len(labels) > _MAX_LABELS:
                raise ConfigError(f"API key file {path}: more than {_MAX_LABELS} names of keys")
            digest = hashlib.sha256(words[0].encode()).digest()
            if digest in digests:
                raise ConfigError(f"API key file {path}, line {number}: this key stands in an earlier line")
            digests.add(digest)
            found.append(ApiKey(digest, len(found) + 1, label, limits))
        if not found:
            raise ConfigError(f"API key file {path} holds no key")
        return cls(found, default)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys or [self.anybody])

    def find(self, request: web.Request) -> ApiKey:
        """Return the key that a request carries, or raise AuthError.

        Takes the same time for every wrong key.
        """
        if not self._keys:
            return self.anybody
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        if not matches or scheme.lower() != "bearer":
            raise AuthError("no valid API key was given")
        return matches[0]


def _settings(words: list[str], default: KeyLimits, where: str) -> tuple[str, KeyLimits]:
    """Return the label and the limits that a line gives its key."""
    label = OTHERS
    values: dict[str, float] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name == "name" and equals:
            label = text
            if not 1 <= len(label) <= _LABEL_CHARS or not label.isprintable():
                raise ConfigError(f"{where}: name {label!r} must have 1 to {_LABEL_CHARS} characters")
            continue
        if name not in _RANGES or not equals:
            # The word is not shown: it may be a part of a key.
            raise ConfigError(
                f"{where}: after the key may come name=..., {', '.join(f'{one}=...' for one in _RANGES)}"
            )
        kind, low, high = _RANGES[name]
        try:
            values[name] = kind(text)
        except ValueError:
            raise ConfigError(f"{where}: {name} {text!r} is not a number") from None
        if not low <= values[name] <= high:
            raise ConfigError(f"{where}: {name} {text} is out of range, allowed {low} to {high}")
    limits = KeyLimits(
        requests_per_minute=int(values.get("requests_per_minute", default.requests_per_minute)),
        max_inflight=int(values.get("max_inflight", default.max_inflight)),
        weight=values.get("weight", default.weight),
    )
    return label, limits


_RANGES: dict[str, tuple[type[int] | type[float], float, float]] = {
    "requests_per_minute": (int, 0, 1_000_000),
    "max_inflight": (int, 0, 1_000_000),
    "weight": (float, 0.01, 100),
}
