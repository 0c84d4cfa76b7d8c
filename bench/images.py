"""`transom bench images`: decoding pictures with the Pillow that is installed, and with another build of it.

The other build lies in a folder of its own (`pip install --no-deps --target FOLDER pillow-simd`); nothing
that is installed is replaced to try it. Each round is a process a build; they take turns.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from PIL import Image
from rich.table import Table

from transom.bench.encoder import parse_size
from transom.bench.encoder_media import draw_picture
from transom.bench.origin import origin
from transom.bench.report import append_rows, progress_bar
from transom.commands.base import make_console, write_json
from transom.encoder.config import EncoderConfig
from transom.encoder.media.wire import ImageJob
from transom.errors import ConfigError, UnavailableError

EXAMPLES = (
    "transom bench images",
    "transom bench images --other simd --out bench/results/images.jsonl",
)
INSTALLED, OTHER = "installed", "other"
MOST_DIFFERENT = 1  # of 255 levels, between builds that may stand for each other
_ROUND_S = 300.0
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--other", type=Path, metavar="FOLDER", help="where another build of Pillow was installed to"
    )
    parser.add_argument("--image", default="2000x1500", metavar="WxH", help="(default %(default)s)")
    for flag, default, text in (
        ("--rounds", 5, "in each of which the builds take turns"),
        ("--repeats", 3, "times that a round decodes each picture"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default %(default)s)"
        )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Return 1 when the other build is none that may stand for the installed one."""
    for name in ("rounds", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.other is not None and not (args.other / "PIL" / "__init__.py").is_file():
        raise ConfigError(f"--other {args.other}: there is no Pillow; pip install --target puts one there")
    rows = measure(args)
    if args.out is not None:
        append_rows(args.out, rows)
    unlike = [row for row in rows if row["build"] == OTHER and not row["alike"]]
    if args.json:
        write_json({"benchmark": "images", "rows": rows, "alike": not unlike})
    else:
        console = make_console()
        for part in tables(rows):
            console.print(part)
    return 1 if unlike else 0


def measure(args: argparse.Namespace) -> list[Row]:
    """Return one row a build and kind of picture."""
    builds: dict[str, Path | None] = {INSTALLED: None}
    if args.other is not None:
        builds[OTHER] = args.other
    with tempfile.TemporaryDirectory(prefix="transom-images-") as name:
        folder = Path(name)
        cases = write_cases(folder, parse_size(args.image))
        found: dict[str, list[Row]] = {build: [] for build in builds}
        with progress_bar("rounds", args.rounds, quiet=args.json) as tick:
            for number in range(args.rounds):
                for build in list(builds)[:: -1 if number % 2 else 1]:
                    found[build].append(_round(build, builds[build], folder, args.repeats))
                tick()
        about = origin("images") | {"image": args.image, "rounds": args.rounds, "repeats": args.repeats}
        return [
            about | _row(build, case, rounds, _difference(folder, build, case))
            for build, rounds in found.items()
            for case in cases
        ]


def write_cases(folder: Path, size: tuple[int, int]) -> list[str]:
    """Write a picture of each kind with the job that decodes it; return their names."""
    defaults = EncoderConfig()
    job = ImageJob(
        factor=28, min_pixels=3136, max_pixels=1_003_520, max_aspect_ratio=200,
        max_image_pixels=defaults.max_image_pixels, full_decode_pixels=defaults.full_decode_pixels,
        max_tokens=10**6, background=(255, 255, 255), frame_index=0,
    )  # fmt: skip
    # So that the picture is far larger than what is wanted of it, and is reduced.
    small = msgspec.structs.replace(job, max_pixels=max(3136, size[0] * size[1] // 12), full_decode_pixels=1)
    plain = Image.open(io.BytesIO(draw_picture(size, "PNG", 0))).convert("RGB")
    clear = plain.copy()
    clear.putalpha(plain.getchannel("R"))
    kinds: dict[str, tuple[Image.Image, str, ImageJob]] = {
        "JPEG": (plain, "JPEG", job),
        "JPEG, CMYK": (plain.convert("CMYK"), "JPEG", job),
        "PNG": (plain, "PNG", job),
        "PNG, transparent": (clear, "PNG", job),
        "PNG, reduced": (plain, "PNG", small),
        "WebP": (plain, "WEBP", job),
        "TIFF": (plain, "TIFF", job),
        "BMP": (plain, "BMP", job),
    }
    for name, (image, form, how) in kinds.items():
        options = {"compress_level": 1} if form == "PNG" else {}
        image.save(folder / f"{name}.picture", form, **options)
        (folder / f"{name}.job").write_bytes(msgspec.json.encode(how))
    return list(kinds)


def _round(build: str, other: Path | None, folder: Path, repeats: int) -> Row:
    """Decode all pictures in a process that finds the build first; return what it printed."""
    results = folder / build
    results.mkdir(exist_ok=True)
    path = os.environ.get("PYTHONPATH", "")
    if other is not None:
        path = os.pathsep.join(part for part in (str(other.resolve()), path) if part)
    command = [
        sys.executable, "-m", "transom.bench.image_worker", str(folder), str(results), str(repeats),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=_ROUND_S, check=False
    )
    if done.returncode != 0:
        told = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise UnavailableError(f"the {build} Pillow can't be used: {' '.join(told)}")
    found: Row = orjson.loads(done.stdout)
    if other is not None and Path(found["path"]).parent.resolve() != other.resolve():
        raise UnavailableError(f"the Pillow in {other} is not the one that is imported: {found['path']} is")
    return found


def _difference(folder: Path, build: str, case: str) -> int | None:
    """Return the largest difference of a channel to the installed build; None where one read nothing."""
    files = [folder / one / f"{case}.npy" for one in (INSTALLED, build)]
    if not all(file.is_file() for file in files):
        return None
    ours, theirs = (np.load(file).astype(np.int16) for file in files)
    return int(np.abs(ours - theirs).max()) if ours.shape == theirs.shape else 255


def _row(build: str, case: str, rounds: Sequence[Row], difference: int | None) -> Row:
    times = [ms for found in rounds for ms in found["cases"][case]["ms"]]
    return {
        "build": build,
        "pillow": rounds[0]["pillow"],
        "case": case,
        "cpu_ms": round(statistics.median(times), 2) if times else None,
        "cpu_best_ms": round(min(times), 2) if times else None,
        "error": rounds[0]["cases"][case]["error"],
        "difference": difference,
        "alike": difference is not None and difference <= MOST_DIFFERENT,
    }


def tables(rows: Sequence[Row]) -> Iterator[str | Table]:
    """Yield what the rows say, to be printed."""
    builds = {row["build"]: row["pillow"] for row in rows}
    table = Table("CPU ms", *(f"pillow {version}" for version in builds.values()))
    if OTHER in builds:
        table.add_column("differs by")
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        cells = ["not read" if row["cpu_ms"] is None else f"{row['cpu_ms']:.1f}" for row in own]
        if OTHER in builds:
            differs = own[-1]["difference"]
            cells.append("-" if differs is None else f"{differs} of 255")
        table.add_row(case, *cells)
    yield table
    yield f"{rows[0]['image']}, medians of {rows[0]['rounds']} rounds of {rows[0]['repeats']}"
    if OTHER in builds:
        unlike = [row["case"] for row in rows if row["build"] == OTHER and not row["alike"]]
        yield f"not alike: {'; '.join(unlike)}" if unlike else "the other build gives the same pictures"
