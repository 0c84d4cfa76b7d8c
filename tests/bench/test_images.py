"""`transom bench images`: another build of Pillow is found, timed and held against the installed one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import PIL
import pytest

from transom.cli import main

pytestmark = pytest.mark.process

SMALL = ("--image", "160x120", "--rounds", "1", "--repeats", "2")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """What `pip install --target` leaves, of the same build."""
    installed = Path(PIL.__file__).parent
    for folder in (installed, installed.parent / "pillow.libs"):
        if folder.is_dir():
            shutil.copytree(folder, tmp_path / "other" / folder.name)
    return tmp_path / "other"


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {f"{row['build']} {row['case']}": row for row in rows}


def test_a_build_that_does_the_same_is_alike(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["bench", "images", *SMALL, "--other", str(other), "--out", str(out)]) == 0
    assert "the other build gives the same pictures" in capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == 16
    assert {row["pillow"] for row in rows.values()} == {PIL.__version__}
    for row in rows.values():
        if row["error"] is None:
            assert row["cpu_ms"] >= row["cpu_best_ms"] > 0
            assert row["difference"] == 0
    assert rows["other PNG"]["error"] is None


def test_a_build_that_lacks_a_format_or_gives_other_pixels_is_not(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (webp,) = (other / "PIL").glob("_webp.*.so")
    webp.unlink()  # as where it is built without the library
    flips = "\n\n_load = PngImageFile.load_end\n\n\ndef _end(self):\n    _load(self)\n"
    flips += "    self.im = self.im.transpose(1)\n\n\nPngImageFile.load_end = _end\n"
    plugin = other / "PIL" / "PngImagePlugin.py"
    plugin.write_text(plugin.read_text(encoding="utf-8") + flips, encoding="utf-8")
    out = tmp_path / "rows.jsonl"
    assert main(["bench", "images", *SMALL, "--other", str(other), "--out", str(out)]) == 1
    rows = rows_of(out)
    assert rows["other WebP"]["cpu_ms"] is None
    assert "WebP" in rows["other WebP"]["error"]
    assert rows["other PNG"]["difference"] > 1
    told = capsys.readouterr().out
    assert "not read" in told
    assert "not alike: PNG; PNG, transparent; PNG, reduced; WebP" in " ".join(told.split())
    assert rows["other JPEG, CMYK"]["alike"]


def test_a_folder_without_a_build_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "images", "--other", str(tmp_path)]) == 2
    assert f"--other {tmp_path}: there is no Pillow" in capsys.readouterr().err
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text("raise ImportError('built for another machine')\n")
    assert main(["bench", "images", *SMALL, "--other", str(tmp_path)]) != 0
    assert "built for another machine" in capsys.readouterr().err
