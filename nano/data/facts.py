"""What is true of a generated or labelled media item, apart from its pixels and samples.

Used by training and evaluation. The dialogue generators ask and answer from these facts only, so
that the same dialogue can carry a cached embedding (training) or a real file (evaluation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black", "white", "grey")
SHAPES = ("circle", "square", "triangle", "star", "cross")
FASHION = (
    "a T-shirt",
    "trousers",
    "a pullover",
    "a dress",
    "a coat",
    "a sandal",
    "a shirt",
    "a sneaker",
    "a bag",
    "an ankle boot",
)
WORDS = [
    "cat",
    "dog",
    "sun",
    "moon",
    "star",
    "tree",
    "fish",
    "bird",
    "book",
    "door",
    "hand",
    "foot",
    "milk",
    "bread",
    "apple",
    "car",
    "bus",
    "train",
    "ship",
    "road",
    "red",
    "blue",
    "green",
    "yes",
    "no",
    "stop",
    "go",
    "left",
    "right",
    "up",
    "down",
    "hello",
    "world",
    "open",
    "closed",
    "exit",
    "push",
    "pull",
    "hot",
    "cold",
    "day",
    "night",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "home",
    "work",
    "food",
    "water",
    "fire",
    "snow",
    "rain",
    "wind",
]
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
DIRECTIONS = {"to the right": (1, 0), "to the left": (-1, 0), "up": (0, -1), "down": (0, 1)}
PITCHES = {"low": (180.0, 320.0), "middle": (550.0, 900.0), "high": (1600.0, 3000.0)}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Shape:
    """One coloured shape; `x` and `y` are its centre as a share of the picture's sides."""

    name: str
    colour: str
    x: float
    y: float

    @property
    def place(self) -> str:
        """Name the ninth of the picture that holds the centre."""
        return PLACES[min(int(self.y * 3), 2)][min(int(self.x * 3), 2)]


@dataclass(frozen=True)
class ImageFacts:
    """`label` is the class of a fashion, digit, word or plain picture; shapes are listed left to right."""

    kind: Literal["shapes", "fashion", "digit", "word", "plain", "unknown"]
    label: str = ""
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class AudioFacts:
    """Spoken `digits`, or `count` tones of one `pitch`, or silence, or something else."""

    kind: Literal["digits", "tones", "silence", "unknown"]
    digits: tuple[int, ...] = ()
    pitch: str = ""
    count: int = 0


@dataclass(frozen=True)
class VideoFacts:
    """One shape that moves (or stays), or an `order` of (label, second) scenes, or something else."""

    kind: Literal["motion", "still", "colours", "digits", "unknown"]
    shape: str = ""
    colour: str = ""
    direction: str = ""
    order: tuple[tuple[str, int], ...] = ()
    sound: AudioFacts | None = None
