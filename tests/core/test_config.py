"""Configuration: layers, conversions, and errors that say key, value and what is allowed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.config import StageConfig, add_flags, config_from_args, describe, load_config, setting
from transom.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sample:
    count: int = setting(3, "a count of things", ge=1, le=10)
    ratio: float = setting(0.5, "a share, in %", ge=0, le=1)
    name: str = setting("x", "a name")
    flag: bool = setting(False, "a switch")
    mode: str = setting("a", "a mode", choices=("a", "b"))
    peers: tuple[str, ...] = setting((), "peers", metavar="ADDR")
    ports: tuple[int, ...] = setting((80,), "ports", ge=0, le=65535)
    limit: int | None = setting(None, "a limit", ge=0)


def from_flags(*argv: str) -> Sample:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    return config_from_args(Sample, "encoder", parser.parse_args(argv))


def load(toml: Path | None = None, env: dict[str, str] | None = None, **flags: Any) -> Sample:
    return load_config(Sample, "encoder", toml_path=toml, environ=env or {}, flags=flags)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_later_layers_win(tmp_path: Path) -> None:
    toml = write(tmp_path, '[common]\nname = "common"\ncount = 4\n[encoder]\ncount = 5\n[decode]\nzzz = 1\n')
    assert load().count == 3
    assert (load(toml).count, load(toml).name) == (5, "common")
    assert load(toml, {"TRANSOM_COUNT": "6"}).count == 6
    both = {"TRANSOM_COUNT": "6", "TRANSOM_ENCODER_COUNT": "7"}
    assert load(toml, both).count == 7
    assert load(toml, both, count="8").count == 8


def test_defaults_that_were_not_given_leave_lower_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_ENCODER_COUNT", "9")
    assert from_flags("--name", "y") == Sample(count=9, name="y")


def test_flags_of_every_kind() -> None:
    assert from_flags(
        "--count", "7", "--ratio", "1", "--flag", "--mode", "b", "--peers", "a,b", "--peers", "c",
        "--ports", "1,2", "--limit", "5",
    ) == Sample(
        count=7, ratio=1.0, flag=True, mode="b", peers=("a", "b", "c"), ports=(1, 2), limit=5
    )  # fmt: skip
    assert from_flags("--no-flag", "--limit", "") == Sample()


def test_toml_of_every_kind(tmp_path: Path) -> None:
    toml = write(
        tmp_path,
        '[encoder]\ncount = 7\nratio = 1\nflag = true\nmode = "b"\n'
        'peers = ["a", "b"]\nports = [1]\nlimit = 5\n',
    )
    assert load(toml) == Sample(
        count=7, ratio=1.0, flag=True, mode="b", peers=("a", "b"), ports=(1,), limit=5
    )


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"TRANSOM_COUNT": "many"}, "environment TRANSOM_COUNT: 'many' is not a valid int"),
        ({"TRANSOM_COUNT": "11"}, "TRANSOM_COUNT: 11 is out of range, allowed 1 to 10"),
        ({"TRANSOM_COUNT": "2.5"}, "'2.5' is not a valid int"),
        ({"TRANSOM_COUNT": ""}, "'' is not a valid int"),
        ({"TRANSOM_RATIO": "nan"}, "nan is out of range"),
        ({"TRANSOM_RATIO": "inf"}, "inf is out of range"),
        ({"TRANSOM_FLAG": "perhaps"}, "'perhaps' is not a valid bool"),
        ({"TRANSOM_MODE": "c"}, "'c' is not one of a, b"),
        ({"TRANSOM_PORTS": "80,x"}, "'80,x' is not a valid"),
        ({"TRANSOM_PORTS": "80,65536"}, "65536 is out of range, allowed 0 to 65535"),
        ({"TRANSOM_ENCODER_COUNTS": "3"}, "TRANSOM_ENCODER_COUNTS: no such setting of encoder"),
    ],
)
def test_bad_environment_is_named(env: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(env=env)
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("[encoder]\ncuont = 3\n", "[encoder] cuont: no such setting of encoder"),
        ("[common]\ncuont = 3\n", "[common] cuont: no such setting of encoder"),
        ("[encodr]\ncount = 3\n", "[encodr]: unknown table, allowed common, decode, encoder"),
        ("[encoder]\ncount = true\n", "True is not a valid int"),
        ("[encoder]\ncount = 3.0\n", "3.0 is not a valid int"),
        ("[encoder]\nratio = true\n", "True is not a valid float"),
        ("[encoder]\nname = 3\n", "3 is not a valid str"),
        ("[encoder]\nports = 3\n", "3 is not a valid"),
        ("encoder = 3\n", "encoder: expected a table [encoder], not 3"),
        ("[encoder\n", "not valid TOML"),
        ("\xff", "settings.toml"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, toml: str, told: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(toml.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert told in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml")


def test_common_settings_of_stages_do_not_trouble_other_commands(tmp_path: Path) -> None:
    assert load(write(tmp_path, '[common]\ndevice = "cpu"\ncount = 4\n')).count == 4


@given(st.integers(1, 10), st.floats(0, 1), st.booleans(), st.lists(st.integers(0, 65535)))
def test_values_survive_the_environment(count: int, ratio: float, flag: bool, ports: list[int]) -> None:
    env = {
        "TRANSOM_COUNT": str(count),
        "TRANSOM_RATIO": repr(ratio),
        "TRANSOM_FLAG": str(flag),
        "TRANSOM_PORTS": ",".join(map(str, ports)),
    }
    assert load(env=env) == Sample(count=count, ratio=ratio, flag=flag, ports=tuple(ports))


def test_help_shows_defaults_and_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags("--help")
    text = capsys.readouterr().out
    assert "a share, in % (default 0.5)" in text
    assert "a name (default x)" in text


def test_describe_has_a_row_for_each_setting() -> None:
    rows = {row["name"]: row for row in describe(StageConfig)}
    assert rows["threads"]["ge"] == 0
    assert rows["log_level"]["choices"] == ("debug", "info", "warning", "error")
    assert all(row["help"] for row in rows.values())
    assert {row["name"]: row["type"] for row in describe(Sample)}["limit"] == "int or none"
