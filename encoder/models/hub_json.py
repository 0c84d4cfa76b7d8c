"""Reading a checkpoint's JSON into frozen config dataclasses, with errors that name key and value.

Encoder process. Knows nothing of any particular model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, cast

from transom.errors import CheckpointError


def reject(where: str, key: str, value: object, allowed: str) -> CheckpointError:
    """Return the error for a value outside its range."""
    return CheckpointError(f"{where}.{key} is {value!r}: must be {allowed}", param=key)


def check_positive(where: str, config: object, names: str) -> None:
    """Raise unless every named (space-separated) attribute of `config` is above 0."""
    for name in names.split():
        value = getattr(config, name)
        if not value > 0:
            raise reject(where, name, value, "above 0")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError when there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, not an object")
    return data


def read_section(path: Path, name: str) -> dict[str, Any]:
    """Return the named object of a checkpoint folder's config.json."""
    section = read_json(path / "config.json").get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"{path / 'config.json'} has no {name}", param=name)
    return section


class FromMapping:
    """Builds a config dataclass from a mapping that may carry fields of no interest."""

    section = "config"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the known fields; convert numbers; raise CheckpointError naming key and value."""
        values: dict[str, Any] = {}
        for spec in fields(cast(Any, cls)):
            if spec.name not in data:
                continue
            value = data[spec.name]
            values[spec.name] = cls._convert(spec.name, str(spec.type), value)
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{cls.section}: {error}") from error

    @classmethod
    def _convert(cls, name: str, kind: str, value: Any) -> Any:
        try:
            if value is None and "None" in kind:
                return None
            if kind.startswith("tuple"):
                # Released audio configs spell per-channel numbers as "1024-1024-256" or "1280".
                parts = value.split("-") if isinstance(value, str) else value
                return tuple(int(part) for part in (parts if isinstance(parts, (list, tuple)) else [parts]))
            if kind.startswith("bool"):
                if not isinstance(value, bool):
                    raise ValueError
                return value
            if kind.startswith("int"):
                number = int(value)
                if number != float(value):
                    raise ValueError
                return number
            if kind.startswith("float"):
                return float(value)
        except (TypeError, ValueError):
            raise reject(cls.section, name, value, f"of type {kind}") from None
        return value
