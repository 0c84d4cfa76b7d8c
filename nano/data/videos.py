"""Videos by seed: a moving shape, colours or digits in order, and out-of-scope ones.

Used by training and evaluation. A video is a function of time, so that training renders only the
sampled frames and evaluation writes a whole file; knows nothing of codecs, patches or prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from transom.nano.data import images
from transom.nano.data.facts import COLOURS, DIRECTIONS, SHAPES, AudioFacts, VideoFacts
from transom.nano.data.images import Pixels, Rng


@dataclass(frozen=True)
class Video:
    """`frame(t)` renders the picture at second t in [0, duration_s)."""

    frame: Callable[[float], Pixels]
    duration_s: float
    fps: int
    facts: VideoFacts

    @property
    def frame_count(self) -> int:
        return max(1, round(self.duration_s * self.fps))


def _video_size(rng: Rng) -> tuple[int, int]:
    width = int(rng.choice([96, 128, 160, 192, 240, 320]))
    height = int(width / float(rng.choice([1.0, 4 / 3, 16 / 9])))
    return (width // 2 * 2, height // 2 * 2) if rng.random() < 0.8 else (height // 2 * 2, width // 2 * 2)


def motion_video(rng: Rng, direction: str | None = None) -> Video:
    """Move one shape straight across the picture; one time in ten it stays."""
    width, height = _video_size(rng)
    still = direction is None and rng.random() < 0.12
    way = direction or str(rng.choice(list(DIRECTIONS)))
    shape, colour = str(rng.choice(SHAPES)), str(rng.choice(COLOURS))
    grounds = [name for name in ("white", "black", "grey") if name != colour]
    ground = images.pick_colour(
        "white" if "white" in grounds and rng.random() < 0.5 else str(rng.choice(grounds)), rng
    )
    fill = images.pick_colour(colour, rng)
    radius = min(width, height) * float(rng.uniform(0.12, 0.2))
    duration = float(rng.uniform(2.0, 10.0))
    dx, dy = DIRECTIONS[way]
    length = width if dx else height
    first, last = float(rng.uniform(0.1, 0.3)) * length, float(rng.uniform(0.7, 0.9)) * length
    across = float(rng.uniform(0.25, 0.75)) * (height if dx else width)
    rest = float(rng.uniform(first, last))

    def frame(t: float) -> Pixels:
        share = min(max(t / duration, 0.0), 1.0)
        along = rest if still else first + (last - first) * (share if dx + dy > 0 else 1 - share)
        image = Image.new("RGB", (width, height), ground)
        centre = (along, across) if dx else (across, along)
        images.draw_shape(ImageDraw.Draw(image), shape, centre, radius, 0.0, fill)
        return np.asarray(image)

    facts = VideoFacts(
        "still" if still else "motion", shape=shape, colour=colour, direction="" if still else way
    )
    return Video(frame, duration, int(rng.choice([8, 10, 15, 24, 25, 30])), facts)


def _scene_starts(rng: Rng, count: int) -> tuple[list[int], int]:
    """Return whole seconds at which scenes start, and the end; mostly on even seconds, as frame pairs are."""
    step = 2 if rng.random() < 0.8 else 3
    lengths = [step * int(rng.choice([1, 2], p=[0.7, 0.3])) for _ in range(count)]
    starts = [sum(lengths[:index]) for index in range(count)]
    return starts, sum(lengths)


def _different_neighbours(rng: Rng, names: list[str], count: int) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < count:
        name = str(rng.choice(names))
        if not chosen or chosen[-1] != name:
            chosen.append(name)
    return chosen


def _order_video(rng: Rng, kind: str, labels: list[str], scenes: list[Pixels]) -> Video:
    starts, end = _scene_starts(rng, len(labels))

    def frame(t: float) -> Pixels:
        return scenes[max(index for index, start in enumerate(starts) if start <= t + 1e-6)]

    order = tuple(zip(labels, starts, strict=True))
    facts = VideoFacts("colours" if kind == "colours" else "digits", order=order)
    return Video(frame, float(end), int(rng.choice([8, 10, 15, 24, 25, 30])), facts)


def colours_video(rng: Rng) -> Video:
    """Show two to four plain colours one after another."""
    labels = _different_neighbours(rng, list(COLOURS), int(rng.integers(2, 5)))
    width, height = _video_size(rng)
    scenes = [np.full((height, width, 3), images.pick_colour(label, rng), np.uint8) for label in labels]
    return _order_video(rng, "colours", labels, scenes)


def digits_video(rng: Rng) -> Video:
    """Show two to four printed digits one after another."""
    labels = _different_neighbours(rng, [str(d) for d in range(10)], int(rng.integers(2, 5)))
    size = _video_size(rng)
    scenes = []
    for label in labels:
        pixels, _ = images.printed_digit_picture(rng, int(label))
        scenes.append(np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)))
    return _order_video(rng, "digits", labels, scenes)


def unknown_video(rng: Rng) -> Video:
    """Show two to four out-of-scope pictures one after another, or noise."""
    size = _video_size(rng)
    scenes = [
        Image.fromarray(images.unknown_picture(rng)[0]).resize(size) for _ in range(int(rng.integers(1, 5)))
    ]
    frames = [np.asarray(scene) for scene in scenes]
    duration = float(rng.uniform(2, 10))

    def frame(t: float) -> Pixels:
        return frames[min(int(t / duration * len(frames)), len(frames) - 1)]

    return Video(frame, duration, 24, VideoFacts("unknown"))


def any_video(rng: Rng) -> Video:
    """Draw a video of any kind, in the shares of the training set."""
    roll = rng.random()
    if roll < 0.45:
        return motion_video(rng)
    if roll < 0.67:
        return colours_video(rng)
    return digits_video(rng) if roll < 0.9 else unknown_video(rng)


def as_sampled(facts: VideoFacts, seconds: Sequence[float], pair: int) -> VideoFacts:
    """Return the facts with an entry of `order` for each group of `pair` sampled frames.

    A group has the time stamp of its first frame, and its entry names what is seen at that moment, even if
    the scene changes within the group. No scene of an order video is so short that this misses it.
    """
    order = []
    for second in seconds[::pair] if facts.order else ():
        label = [name for name, start in facts.order if start <= second + 1e-6][-1]
        order.append((label, math.floor(second + 1e-6)))
    return VideoFacts(facts.kind, facts.shape, facts.colour, facts.direction, tuple(order), facts.sound)


def with_sound(facts: VideoFacts, sound: AudioFacts | None) -> VideoFacts:
    """Return the facts of the same pictures with `sound`."""
    return VideoFacts(facts.kind, facts.shape, facts.colour, facts.direction, facts.order, sound)
