"""Configuration: one frozen dataclass per process, filled from defaults < TOML < environment < flags.

The only place that reads the environment. Unknown keys and bad values stop the process at start with
the key, the value and what is allowed. Stages subclass `StageConfig` in their own config.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transom.errors import ConfigError

ENV_PREFIX = "TRANSOM_"
T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    le: float | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare a field of a config dataclass with its help text and its allowed range.

    A tuple default makes a repeatable flag; a None default makes an optional value.
    """
    metadata = {"help": help, "ge": ge, "le": le, "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Settings that every stage process has."""

    model: str = setting(
        "mimo-nano", "checkpoint: mimo-nano, a folder, or a hub id org/name", metavar="MODEL"
    )
    device: str = setting("auto", "torch device; auto is cuda if there, else cpu", metavar="DEVICE")
    threads: int = setting(0, "CPU threads for tensor work in this process; 0: all cores", ge=0, le=1024)
    bind: str = setting("tcp://127.0.0.1:0", "address of the ZMQ inbox; port 0: any free one", metavar="ADDR")
    advertise: str = setting("", "inbox address that peers should use, if not the bound one", metavar="ADDR")
    http_host: str = setting("127.0.0.1", "host of the HTTP listener (health; the API on the gateway)")
    http_port: int = setting(0, "port of the HTTP listener; 0: any free one", ge=0, le=65535)
    head_timeout_s: float = setting(
        60.0, "time an HTTP client may take over the head of a request", ge=0.1, le=3600
    )
    curve_key_file: str = setting(
        "", "fleet key file (`transom keys`); required off loopback", metavar="FILE"
    )
    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))
    log_json: bool = setting(False, "log one JSON object a line")
    watch_stdin: bool = setting(False, "stop when stdin closes (set by `transom up`)")
    drain_timeout_s: float = setting(3.0, "how long running requests may finish after SIGTERM", ge=0, le=3600)
    send_buffer_mb: int = setting(512, "bytes queued to one peer before senders wait", ge=1, le=65536)


def client_api_key(environ: Mapping[str, str] | None = None) -> str:
    """Return the key that our own clients send: TRANSOM_API_KEY, never a flag that a process list shows."""
    return (os.environ if environ is None else environ).get(f"{ENV_PREFIX}API_KEY", "")


def telemetry_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return OpenTelemetry's own variables: its library reads them too, by their standard names."""
    found = os.environ if environ is None else environ
    return {name: value for name, value in found.items() if name.startswith("OTEL_")}


def _base_type(annotation: Any) -> tuple[Any, bool]:
    """Return (type, optional) of a field annotation."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        args = [a for a in typing.get_args(annotation) if a is not type(None)]
        return args[0], True
    return annotation, False


def parse_value(field: dataclasses.Field[Any], annotation: Any, raw: Any, source: str) -> Any:
    """Convert `raw` (string or TOML value) to the field's type and check its range."""
    kind, optional = _base_type(annotation)
    if optional and raw in ("", None):
        return None
    try:
        value = _convert(kind, raw)
    except (ValueError, TypeError):
        name = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{source}: {raw!r} is not a valid {name}") from None
    meta = field.metadata
    for item in value if isinstance(value, tuple) else (value,):
        if meta.get("choices") and item not in meta["choices"]:
            raise ConfigError(f"{source}: {item!r} is not one of {', '.join(meta['choices'])}")
        low, high = meta.get("ge"), meta.get("le")
        if (low is not None and item < low) or (high is not None and item > high) or item != item:
            raise ConfigError(f"{source}: {item!r} is out of range, allowed {low} to {high}")
    return value


def _convert(kind: Any, raw: Any) -> Any:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        text = str(raw).strip().lower()
        if text in ("1", "true", "yes", "on"):
            return True
        if text in ("0", "false", "no", "off"):
            return False
        raise ValueError(raw)
    if kind is int:
        if isinstance(raw, (bool, float)):
            raise ValueError(raw)
        return int(raw)
    if kind is float:
        if isinstance(raw, bool):
            raise ValueError(raw)
        return float(raw)
    if typing.get_origin(kind) is tuple:
        items = raw.split(",") if isinstance(raw, str) else list(raw)
        inner = typing.get_args(kind)[0]
        return tuple(
            _convert(inner, item.strip() if isinstance(item, str) else item) for item in items if item != ""
        )
    if kind is str and not isinstance(raw, str):
        raise ValueError(raw)
    return kind(raw)


def _fields(cls: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {f.name: (f, hints[f.name]) for f in dataclasses.fields(cls)}


def load_config(
    cls: type[T],
    section: str,
    *,
    toml_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> T:
    """Build the config of one process; later sources win.

    TOML: keys of the table `[section]` over those of `[common]`. Environment:
    `TRANSOM_<SECTION>_<KEY>` over `TRANSOM_<KEY>`. `flags` holds only what the user gave.
    """
    fields = _fields(cls)
    values: dict[str, Any] = {}
    if toml_path:
        values.update(_from_toml(cls, section, Path(toml_path)))
    env = os.environ if environ is None else environ
    for name, (field, annotation) in fields.items():
        for key in (f"{ENV_PREFIX}{name.upper()}", f"{ENV_PREFIX}{section.upper()}_{name.upper()}"):
            if key in env:
                values[name] = parse_value(field, annotation, env[key], f"environment {key}")
    own_prefix = f"{ENV_PREFIX}{section.upper()}_"
    for key in env:
        if key.startswith(own_prefix) and key[len(own_prefix) :].lower() not in fields:
            raise ConfigError(f"environment {key}: no such setting of {section}")
    for name, raw in (flags or {}).items():
        field, annotation = fields[name]
        values[name] = parse_value(field, annotation, raw, f"--{name.replace('_', '-')}")
    return cls(**values)


def _from_toml(cls: type[Any], section: str, path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}") from None
    fields = _fields(cls)
    shared = {field.name for field in dataclasses.fields(StageConfig)}
    values: dict[str, Any] = {}
    for table in ("common", section):
        settings = document.get(table, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{path} {table}: expected a table [{table}], not {settings!r}")
        for key, raw in settings.items():
            if key not in fields:
                if table == "common" and key in shared:
                    continue  # for the stages; `transom up` itself has no such setting
                raise ConfigError(f"{path} [{table}] {key}: no such setting of {section}")
            field, annotation = fields[key]
            values[key] = parse_value(field, annotation, raw, f"{path} [{table}] {key}")
    known = {"common", "gateway", "encoder", "prefill", "decode", "up"}
    for table in document:
        if table not in known:
            raise ConfigError(f"{path} [{table}]: unknown table, allowed {', '.join(sorted(known))}")
    return values


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add one flag per field of `cls`, plus --config; absent flags leave no trace in the namespace."""
    parser.add_argument("--config", metavar="FILE", default=None, help="TOML file with settings")
    for name, (field, annotation) in _fields(cls).items():
        flag = f"--{name.replace('_', '-')}"
        kind, _ = _base_type(annotation)
        meta = field.metadata
        shown = "" if field.default in ("", None, ()) else f" (default {field.default})"
        text = str(meta.get("help", "")).replace("%", "%%") + shown
        if kind is bool:
            parser.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        elif typing.get_origin(kind) is tuple:
            parser.add_argument(
                flag, dest=name, action="append", default=argparse.SUPPRESS, help=text + " (repeatable)",
                metavar=meta.get("metavar"),
            )  # fmt: skip
        else:
            parser.add_argument(
                flag, dest=name, default=argparse.SUPPRESS, help=text, metavar=meta.get("metavar")
            )


def config_from_args(cls: type[T], section: str, args: argparse.Namespace) -> T:
    """Build the config from parsed flags made by `add_flags`."""
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    flags = {}
    for name, value in vars(args).items():
        if name in names:
            flags[name] = (
                [part for item in value for part in item.split(",")] if isinstance(value, list) else value
            )
    return load_config(cls, section, toml_path=args.config, flags=flags)


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    return getattr(kind, "__name__", str(kind))


def describe(cls: type[Any]) -> list[dict[str, Any]]:
    """Return one row per setting (name, type, default, help, range): the source of docs/config.md."""
    rows = []
    for name, (field, annotation) in _fields(cls).items():
        kind, optional = _base_type(annotation)
        rows.append(
            {
                "name": name,
                "type": _type_name(kind) + (" or none" if optional else ""),
                "default": field.default,
                "help": field.metadata.get("help", ""),
                "ge": field.metadata.get("ge"),
                "le": field.metadata.get("le"),
                "choices": field.metadata.get("choices"),
            }
        )
    return rows
