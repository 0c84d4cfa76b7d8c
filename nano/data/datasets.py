"""Real data sets: Fashion-MNIST, scikit-learn's handwritten digits, Free Spoken Digits.

Used by training and evaluation. Says what to install or download when a file is missing; splits are
the official ones, and for the handwritten digits a fixed one (every fifth sample is held out).
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "test"]
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
SPOKEN_ENV = "NANO_SPOKEN_DIGITS"
_RECORDING = re.compile(r"(\d)_(\w+)_(\d+)\.wav$")


class MissingDataError(RuntimeError):
    """A data set is not there; the message says how to get it."""


@dataclass(frozen=True)
class Recording:
    """One spoken digit: 8 kHz mono samples in [-1, 1]."""

    digit: int
    speaker: str
    take: int
    samples: NDArray[np.float32]


def generator(*seed: int) -> np.random.Generator:
    """Return the generator of a purpose: the same numbers for the same seed everywhere."""
    return np.random.default_rng(list(seed))


def fashion(split: Split) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return Fashion-MNIST pictures (n, 28, 28) and labels (n,)."""
    stem = "train" if split == "train" else "t10k"
    images, labels = (FASHION_FOLDER / f"{stem}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1"))
    if not images.exists() or not labels.exists():
        raise MissingDataError(f"{images} is missing: apt-get install dataset-fashion-mnist")
    pixels = np.frombuffer(gzip.decompress(images.read_bytes()), np.uint8, offset=16).reshape(-1, 28, 28)
    return pixels, np.frombuffer(gzip.decompress(labels.read_bytes()), np.uint8, offset=8)


def handwritten(split: Split) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return scikit-learn's digits as (n, 8, 8) in 0..255 (ink bright) and labels (n,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDataError("scikit-learn is missing: pip install scikit-learn") from error
    data: Any = load_digits()
    held_out = np.arange(len(data.target)) % 5 == 0
    keep = held_out if split == "test" else ~held_out
    return (data.images[keep] * (255 / 16)).astype(np.uint8), np.asarray(data.target[keep], dtype=np.uint8)


def spoken_path(given: str | None = None) -> Path:
    """Find the Free Spoken Digits archive or folder: the flag, or the environment variable."""
    found = given or os.environ.get(SPOKEN_ENV)
    if not found or not Path(found).exists():
        raise MissingDataError(
            f"Free Spoken Digits not found ({found!r}): give --spoken-digits or {SPOKEN_ENV}, "
            "a .tar.xz or a folder of recordings/DIGIT_SPEAKER_N.wav (https://github.com/Jakobovski/free-spoken-digit-dataset)"
        )
    return Path(found)


def spoken(split: Split, path: Path) -> list[Recording]:
    """Read the recordings of a split (test: takes 0 to 4), ordered by name."""
    recordings = []
    for name, content in sorted(_wav_files(path)):
        match = _RECORDING.search(name)
        if match is None:
            continue
        digit, speaker, take = int(match[1]), match[2], int(match[3])
        if (take < 5) == (split == "test"):
            recordings.append(Recording(digit, speaker, take, _wav_samples(content)))
    if not recordings:
        raise MissingDataError(f"{path} holds no recordings named DIGIT_SPEAKER_N.wav")
    return recordings


def _wav_files(path: Path) -> list[tuple[str, bytes]]:
    if path.is_dir():
        return [(file.name, file.read_bytes()) for file in path.rglob("*.wav")]
    found = []
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith(".wav") else None
            if stream is not None:
                found.append((Path(member.name).name, stream.read()))
    return found


def _wav_samples(content: bytes) -> NDArray[np.float32]:
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getsampwidth(), file.getnchannels(), file.getframerate()) == (2, 1, 8000)
        raw = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return raw.astype(np.float32) / np.float32(32768)
