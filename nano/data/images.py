"""Pictures by seed: coloured shapes, plain colours, printed words and digits, and out-of-scope ones.

Used by training and evaluation. Each generator returns RGB pixels and the facts that hold for
them; nothing here knows the model, its patches or its prompts.
"""

from __future__ import annotations

import colorsys
import io
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from transom.nano.data.facts import COLOURS, SHAPES, WORDS, ImageFacts, Shape

Pixels = NDArray[np.uint8]
Rng = np.random.Generator

# Hue range in degrees, saturation range, value range. They do not touch: a name is never ambiguous.
_COLOUR_RANGES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-6, 6), (0.8, 1.0), (0.75, 1.0)),
    "orange": ((24, 38), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((52, 61), (0.75, 1.0), (0.92, 1.0)),
    "green": ((105, 145), (0.7, 1.0), (0.45, 1.0)),
    "blue": ((212, 242), (0.75, 1.0), (0.6, 1.0)),
    "purple": ((268, 300), (0.6, 1.0), (0.45, 0.72)),
    "pink": ((325, 352), (0.2, 0.5), (0.97, 1.0)),
    "black": ((0, 360), (0.0, 0.1), (0.0, 0.1)),
    "white": ((0, 360), (0.0, 0.02), (0.97, 1.0)),
    "grey": ((0, 360), (0.0, 0.04), (0.4, 0.65)),
}
# Centres keep this share of a side away from the lines between thirds, and from each other's columns:
# a place or "left to right" is never ambiguous either.
PLACE_MARGIN = 0.035
_FONT_FOLDERS = ("/usr/share/fonts/truetype/dejavu", "/usr/share/fonts/TTF", "/usr/share/fonts/dejavu")
_FONT_NAMES = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "DejaVuSansMono.ttf",
)


def pick_colour(name: str, rng: Rng) -> tuple[int, int, int]:
    """Draw one RGB value that everybody would call `name`."""
    hue, saturation, value = (float(rng.uniform(*limits)) for limits in _COLOUR_RANGES[name])
    red, green, blue = colorsys.hsv_to_rgb((hue % 360) / 360, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_shape(
    draw: ImageDraw.ImageDraw, name: str, centre: tuple[float, float], radius: float, turn: float, fill: Any
) -> None:
    """Draw one filled shape; `turn` is in radians."""
    x, y = centre
    if name == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return
    if name == "cross":
        arm = radius * 0.36
        corners = [(-arm, -radius), (arm, -radius), (arm, -arm), (radius, -arm), (radius, arm), (arm, arm)]
        corners += [(arm, radius), (-arm, radius), (-arm, arm), (-radius, arm), (-radius, -arm), (-arm, -arm)]
    elif name == "square":
        side = radius * 0.86
        corners = [(-side, -side), (side, -side), (side, side), (-side, side)]
    elif name == "triangle":
        corners = [(0, -radius), (radius * 0.95, radius * 0.75), (-radius * 0.95, radius * 0.75)]
    else:
        spikes = [(radius if i % 2 == 0 else radius * 0.42, math.pi * i / 5) for i in range(10)]
        corners = [(length * math.sin(angle), -length * math.cos(angle)) for length, angle in spikes]
    cos, sin = math.cos(turn), math.sin(turn)
    draw.polygon([(x + px * cos - py * sin, y + px * sin + py * cos) for px, py in corners], fill=fill)


def picture_size(rng: Rng) -> tuple[int, int]:
    """Draw a picture's (width, height): icons, common formats, both orientations."""
    if rng.random() < 0.3:
        side = int(rng.choice([48, 64, 96, 100, 128, 200, 224, 256]))
        return side, side
    long_side = int(rng.integers(90, 330))
    short_side = int(long_side / rng.uniform(1.0, 1.8))
    return (long_side, short_side) if rng.random() < 0.65 else (short_side, long_side)


def _background(rng: Rng, used: set[str]) -> tuple[str, tuple[int, int, int]]:
    names = [
        name for name in ("white", "black", "grey", "yellow", "blue", "green", "pink") if name not in used
    ]
    if "white" not in used and rng.random() < 0.55:
        return "white", pick_colour("white", rng)
    name = str(rng.choice(names))
    return name, pick_colour(name, rng)


def shapes_picture(rng: Rng, *, count: int | None = None) -> tuple[Pixels, ImageFacts]:
    """Draw one to four shapes on a plain ground: all of one kind, or two different ones."""
    total = count or int(rng.choice([1, 2, 3, 4], p=[0.5, 0.28, 0.12, 0.1]))
    width, height = picture_size(rng)
    kinds = [(str(rng.choice(SHAPES)), str(rng.choice(COLOURS)))] * total
    if total == 2 and rng.random() < 0.75:
        while kinds[1] == kinds[0]:
            kinds = [kinds[0], (str(rng.choice(SHAPES)), str(rng.choice(COLOURS)))]
    scale = 2 if max(width, height) < 200 else 1
    _, ground = _background(rng, {colour for _, colour in kinds})
    image = Image.new("RGB", (width * scale, height * scale), ground)
    draw = ImageDraw.Draw(image)
    short = min(width, height) * scale
    largest = {1: 0.46, 2: 0.26, 3: 0.2, 4: 0.18}[total]
    smallest = {1: 0.18, 2: 0.14, 3: 0.12, 4: 0.11}[total]
    placed: list[tuple[float, float, float]] = []
    shapes = []
    fills = {kind: pick_colour(kind[1], rng) for kind in kinds}
    for kind in kinds:
        spot = _free_spot(rng, image.size, short, (smallest, largest), placed)
        if spot is None:
            continue
        placed.append(spot)
        x, y, radius = spot
        turn = 0.0 if kind[0] == "circle" else float(rng.normal(0, 0.1))
        draw_shape(draw, kind[0], (x, y), radius, turn, fills[kind])
        shapes.append(Shape(kind[0], kind[1], x / image.width, y / image.height))
    if scale != 1:
        image = image.resize((width, height), Image.Resampling.BOX)
    shapes.sort(key=lambda shape: shape.x)
    return np.asarray(image), ImageFacts("shapes", shapes=tuple(shapes))


def _free_spot(
    rng: Rng,
    size: tuple[int, int],
    short: float,
    limits: tuple[float, float],
    placed: list[tuple[float, float, float]],
) -> tuple[float, float, float] | None:
    for attempt in range(60):
        radius = short * float(rng.uniform(limits[0], limits[1] if attempt < 20 else sum(limits) / 2))
        x = float(rng.uniform(radius, size[0] - radius))
        y = float(rng.uniform(radius, size[1] - radius))
        if not placed and rng.random() < 0.35:
            x, y = size[0] / 2, size[1] / 2
        if not (_names_a_place(x / size[0]) and _names_a_place(y / size[1])):
            continue
        if all(
            math.hypot(x - px, y - py) > (radius + other) * 1.12 and abs(x - px) > size[0] * PLACE_MARGIN
            for px, py, other in placed
        ):
            return x, y, radius
    return None


def _names_a_place(share: float) -> bool:
    """Tell whether everybody would say on which third of a side this is."""
    return min(abs(share - 1 / 3), abs(share - 2 / 3)) > PLACE_MARGIN


def plain_picture(rng: Rng) -> tuple[Pixels, ImageFacts]:
    """Fill a picture with one colour."""
    name = str(rng.choice(COLOURS))
    width, height = picture_size(rng)
    return np.full((height, width, 3), pick_colour(name, rng), np.uint8), ImageFacts("plain", name)


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    for folder in _FONT_FOLDERS:
        if (path := Path(folder) / name).exists():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def _text_picture(rng: Rng, text: str, size: tuple[int, int], share: tuple[float, float]) -> Pixels:
    ink, paper = ("black", "white") if rng.random() < 0.6 else ("white", "black")
    if rng.random() < 0.3:
        dark, light = (
            str(rng.choice(["red", "blue", "purple", "black"])),
            str(rng.choice(["white", "yellow", "pink"])),
        )
        ink, paper = (dark, light) if rng.random() < 0.6 else (light, dark)
    image = Image.new("RGB", size, pick_colour(paper, rng))
    draw = ImageDraw.Draw(image)
    name = _FONT_NAMES[int(rng.integers(len(_FONT_NAMES)))]
    probe = _font(name, 40).getbbox(text)
    target = float(rng.uniform(*share))
    points = int(40 * min(size[0] * target / (probe[2] - probe[0]), size[1] * 0.85 / (probe[3] - probe[1])))
    font = _font(name, max(points, 8))
    left, top, right, bottom = font.getbbox(text)
    slack_x, slack_y = size[0] - (right - left), size[1] - (bottom - top)
    x = slack_x * float(rng.uniform(0.25, 0.75)) - left
    y = slack_y * float(rng.uniform(0.25, 0.75)) - top
    draw.text((x, y), text, font=font, fill=pick_colour(ink, rng))
    return np.asarray(image)


def word_picture(rng: Rng) -> tuple[Pixels, ImageFacts]:
    """Print one word of the known list, in lower case, capitals or with a capital."""
    word = str(rng.choice(WORDS))
    style = rng.random()
    shown = word if style < 0.5 else word.upper() if style < 0.75 else word.capitalize()
    width = int(rng.integers(110, 300))
    size = (width, int(width * rng.uniform(0.35, 0.9)))
    return _text_picture(rng, shown, size, (0.65, 0.95)), ImageFacts("word", word)


def printed_digit_picture(rng: Rng, digit: int | None = None) -> tuple[Pixels, ImageFacts]:
    """Print one digit."""
    value = int(rng.integers(10)) if digit is None else digit
    side = int(rng.integers(64, 240))
    return _text_picture(rng, str(value), (side, side), (0.25, 0.6)), ImageFacts("digit", str(value))


def unknown_picture(rng: Rng) -> tuple[Pixels, ImageFacts]:
    """Draw what the model must not claim to know: noise, textures, gradients, scribbles."""
    width, height = picture_size(rng)
    style = int(rng.integers(6))
    if style == 0:
        pixels = rng.integers(0, 256, (height, width, 3)).astype(np.float64)
    elif style == 1:
        pixels = _smooth_noise(rng, height, width)
    elif style == 2:
        corners = rng.uniform(0, 255, (2, 2, 3))
        pixels = np.asarray(
            Image.fromarray(corners.astype(np.uint8)).resize((width, height), Image.Resampling.BILINEAR),
            dtype=np.float64,
        )
    elif style == 3:
        yy, xx = np.mgrid[0:height, 0:width]
        angle, period = rng.uniform(0, math.pi), rng.uniform(4, 30)
        wave = (np.sin((xx * math.cos(angle) + yy * math.sin(angle)) * 2 * math.pi / period) + 1) / 2
        first, second = rng.uniform(0, 255, 3), rng.uniform(0, 255, 3)
        pixels = wave[..., None] * first + (1 - wave[..., None]) * second
    else:
        pixels = _scribbles(rng, height, width, over_noise=style == 5)
    return np.clip(pixels, 0, 255).astype(np.uint8), ImageFacts("unknown")


def _smooth_noise(rng: Rng, height: int, width: int) -> NDArray[np.float64]:
    total = np.zeros((height, width, 3))
    grey = rng.random() < 0.3
    for cells in (3, 6, 12, 24):
        coarse = rng.uniform(0, 255, (cells, cells, 3)).astype(np.uint8)
        layer = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(layer, dtype=np.float64) / (cells / 3) ** 0.7
    total = (total - total.min()) / (total.max() - total.min() + 1e-9) * 255
    return np.repeat(total.mean(-1, keepdims=True), 3, -1) if grey else total


def _scribbles(rng: Rng, height: int, width: int, *, over_noise: bool) -> NDArray[np.float64]:
    ground = (
        _smooth_noise(rng, height, width)
        if over_noise
        else np.full((height, width, 3), rng.uniform(0, 255, 3))
    )
    image = Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(8, 30))):
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        x0, y0 = rng.uniform(0, width), rng.uniform(0, height)
        x1, y1 = x0 + rng.normal(0, width / 4), y0 + rng.normal(0, height / 4)
        box = (min(x0, x1), min(y0, y1), max(x0, x1) + 1, max(y0, y1) + 1)
        style = int(rng.integers(4))
        if style == 0:
            draw.line((x0, y0, x1, y1), fill=colour, width=int(rng.integers(1, 6)))
        elif style == 1:
            draw.rectangle(box, fill=colour)
        elif style == 2:
            draw.arc(box, float(rng.uniform(0, 180)), float(rng.uniform(180, 360)), fill=colour, width=3)
        else:
            draw.polygon([(rng.uniform(0, width), rng.uniform(0, height)) for _ in range(3)], fill=colour)
    return np.asarray(image, dtype=np.float64)


def wear(pixels: Pixels, rng: Rng) -> Pixels:
    """Age a picture as uploads are: JPEG loss, blur, noise, brightness; often nothing."""
    roll = rng.random()
    if roll < 0.5:
        return pixels
    image = Image.fromarray(pixels)
    if roll < 0.75:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=int(rng.integers(40, 95)))
        return np.asarray(Image.open(buffer).convert("RGB"))
    if roll < 0.85:
        return np.asarray(image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 1.2)))))
    noisy = pixels + rng.normal(0, rng.uniform(2, 10), pixels.shape)
    return np.clip(noisy * rng.uniform(0.9, 1.08), 0, 255).astype(np.uint8)
