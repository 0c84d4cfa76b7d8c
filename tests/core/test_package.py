"""What an installed package must hold besides modules: the data files that the code reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "transom"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA_SUFFIXES = {".json", ".jinja", ".safetensors", ".html", ".css", ".js", ".svg", ".cpp", ".typed", ".txt"}
# Made on a developer's machine, never shipped.
LEFT_OUT = {"nano/runs", "nano/datasets", "bench/results"}


def test_every_data_file_is_in_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["transom"]
    packed = {path.resolve() for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    missing = []
    for folder in (PACKAGE, *(link.resolve() for link in PACKAGE.iterdir() if link.is_symlink())):
        for path in folder.rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in DATA_SUFFIXES and not any(name.startswith(left) for left in LEFT_OUT):
                if path.resolve() not in packed:
                    missing.append(name)
    assert missing == []
    assert (ROOT / "nano/checkpoint/model.safetensors").resolve() in packed


def test_the_checkpoint_is_small_enough_to_ship() -> None:
    files = [path for path in (ROOT / "nano/checkpoint").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25 * 1024 * 1024


def test_every_stage_folder_is_found_as_a_package() -> None:
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": ["transom*"], "namespaces": True}
    assert PROJECT["project"]["scripts"] == {"transom": "transom.cli:main"}
