"""Reads a checkpoint's config.json key by key, with errors that name the key and its value (llm processes).

Shared by all architectures; knows none of them. Knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transom.errors import ConfigError

_TOKEN_ID_SUFFIX = "_token_id"


def read_json(folder: str | Path) -> dict[str, Any]:
    """Return `folder/config.json`. Raise ConfigError when it is absent or no JSON object."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


class ConfigReader:
    """One config.json; every architecture's reader builds on it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.num_layers = self.integer("num_hidden_layers", low=1)

    def refuse_other(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """What would change the arithmetic but is not implemented must not be ignored silently."""
        for key, values in allowed.items():
            value = self.raw.get(key)
            if value not in values:
                listed = ", ".join(repr(v) for v in values if v is not None)
                raise ConfigError(f"{key} = {value!r} is not supported; allowed: {listed}")

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer: none, one or a list of them."""
        eos = self.raw.get("eos_token_id")
        return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)

    def token_ids(self) -> dict[str, int]:
        """Collect `*_token_id` of the top level and of processor_config, keyed without the suffix."""
        found: dict[str, int] = {}
        for source in (self.raw.get("processor_config") or {}, self.raw):
            for key, value in source.items():
                if key.endswith(_TOKEN_ID_SUFFIX) and isinstance(value, int):
                    found[key.removesuffix(_TOKEN_ID_SUFFIX)] = value
        return found

    def integer(self, *names: str, default: int | None = None, low: int) -> int:
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} = {value!r} must be a whole number >= {low}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        name, value = self._first(names, default)
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        if not usable or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name} = {value!r} must be a number > 0")
        return float(value)

    def _first(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """Return the first of `names` that is present and not null: the hub writes null for a default."""
        for name in names:
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        if default is None:
            raise ConfigError(f"{names[0]} is missing")
        return names[0], default
