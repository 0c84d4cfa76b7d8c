"""Stage A: teach the vision tower to see, with light classification heads on its output tokens.

Used by training only. Every token answers which shape has its centre in it, for the first and the second
frame; the mean of a picture's tokens answers what kind of picture it is, which class and which way its
shape moves. The heads are thrown away: the language model reads the same tokens later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from transom.encoder.models.config import ProcessorConfig, VisionConfig
from transom.encoder.models.vision import VisionTower
from transom.nano.data import datasets, images, videos
from transom.nano.data.facts import COLOURS, DIRECTIONS, FASHION, SHAPES, WORDS, ImageFacts, Shape, VideoFacts
from transom.nano.data.images import Pixels, Rng
from transom.nano.media import Grid, frames_patches
from transom.nano.stages.loop import Loop, LoopConfig, settle_head, starts_from_weights

KINDS = ("shapes", "fashion", "digit", "word", "plain", "unknown")
MOTIONS = ("", *DIRECTIONS)
CLASSES = {"fashion": len(FASHION), "digit": 10, "word": len(WORDS), "plain": len(COLOURS)}
BATCH = 64
# Digits in videos are stretched to the frame, and a pair may show two of them: they need the most looks.
# Chance alone makes a tenth of the pairs show two scenes, which teaches nothing about them.
VIDEO_SHARE, MORE_DIGITS_SHARE, MORE_FASHION_SHARE, MORE_WORDS_SHARE = 0.37, 0.4, 0.18, 0.05
CHANGE_SHARE = 0.45


class PictureSource:
    """Draws labelled pictures of every kind; real ones come from one split."""

    def __init__(self, split: datasets.Split) -> None:
        self.fashion, self.fashion_labels = datasets.fashion(split)
        self.digits, self.digit_labels = datasets.handwritten(split)

    def draw(self, rng: Rng) -> tuple[Pixels, ImageFacts]:
        """Draw one picture, in the shares of the training set, worn as uploads are."""
        roll = rng.random()
        if roll < 0.31:
            return self.fashion_picture(rng)
        if roll < 0.39:
            return self.handwritten_picture(rng)
        if roll < 0.46:
            pixels, facts = images.printed_digit_picture(rng)
        elif roll < 0.78:
            pixels, facts = images.shapes_picture(rng)
        elif roll < 0.9:
            pixels, facts = images.word_picture(rng)
        elif roll < 0.93:
            pixels, facts = images.plain_picture(rng)
        else:
            pixels, facts = images.unknown_picture(rng)
        return images.wear(pixels, rng), facts

    def fashion_picture(
        self, rng: Rng, index: int | None = None, *, varied: bool = True
    ) -> tuple[Pixels, ImageFacts]:
        """Return one Fashion-MNIST picture, or a random one; `varied` shifts, mirrors, inverts it."""
        row = int(rng.integers(len(self.fashion))) if index is None else index
        grey = self.fashion[row]
        if varied:
            grey = _vary(grey, rng, mirror=True, turn=4.0, shift=1.5, zoom=0.06)
        return _to_rgb(grey, rng, varied), ImageFacts("fashion", FASHION[int(self.fashion_labels[row])])

    def handwritten_picture(
        self, rng: Rng, index: int | None = None, *, varied: bool = True
    ) -> tuple[Pixels, ImageFacts]:
        """Return one handwritten digit, or a random one; `varied` turns, shifts, enlarges, inverts it."""
        row = int(rng.integers(len(self.digits))) if index is None else index
        grey = self.digits[row]
        if varied:
            grey = _vary(grey, rng, mirror=False, turn=10.0, shift=0.7, zoom=0.12)
        return _to_rgb(grey, rng, varied), ImageFacts("digit", str(self.digit_labels[row]))


def _vary(grey: Pixels, rng: Rng, *, mirror: bool, turn: float, shift: float, zoom: float) -> Pixels:
    image = Image.fromarray(grey)
    if mirror and rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.7:
        side = grey.shape[0]
        angle = np.deg2rad(rng.normal(0, turn / 2))
        scale = 1 + float(rng.uniform(-zoom, zoom))
        cos, sin, middle = np.cos(angle) / scale, np.sin(angle) / scale, (side - 1) / 2
        dx, dy = rng.uniform(-shift, shift, 2)
        move = (
            cos,
            sin,
            middle - cos * middle - sin * middle + dx,
            -sin,
            cos,
            middle + sin * middle - cos * middle + dy,
        )
        image = image.transform(image.size, Image.Transform.AFFINE, move, Image.Resampling.BILINEAR)
    return np.asarray(image)


def _to_rgb(grey: Pixels, rng: Rng, varied: bool) -> Pixels:
    if varied and rng.random() < 0.25:
        side = int(rng.integers(grey.shape[0], 257))
        resample = Image.Resampling.NEAREST if rng.random() < 0.3 else Image.Resampling.BICUBIC
        grey = np.asarray(Image.fromarray(grey).resize((side, side), resample))
        if rng.random() < 0.4:
            return images.wear(np.repeat(grey[..., None], 3, -1), rng)
    if varied and rng.random() < 0.06:
        grey = 255 - grey
    return np.repeat(grey[..., None], 3, -1)


@dataclass(frozen=True)
class Example:
    """A picture, or two frames of a video, with the facts of each frame and the way its shape moves."""

    frames: tuple[Pixels, ...]
    facts: tuple[ImageFacts, ImageFacts]
    motion: str | None = None


def _pair_facts(video: videos.Video, second: float, position: tuple[float, float] | None) -> ImageFacts:
    facts: VideoFacts = video.facts
    if facts.kind in ("motion", "still"):
        assert position is not None
        return ImageFacts("shapes", shapes=(Shape(facts.shape, facts.colour, *position),))
    if facts.kind == "unknown":
        return ImageFacts("unknown")
    label = [name for name, start in facts.order if start <= second + 1e-6][-1]
    return ImageFacts("plain" if facts.kind == "colours" else "digit", label)


def _centre(frame: Pixels) -> tuple[float, float]:
    """Find the centre of what stands out from the corner's colour."""
    different = np.abs(frame.astype(int) - frame[0, 0].astype(int)).sum(-1) > 12
    ys, xs = np.nonzero(different)
    if len(xs) == 0:
        return 0.5, 0.5
    return float((xs.min() + xs.max()) / 2 / frame.shape[1]), float(
        (ys.min() + ys.max()) / 2 / frame.shape[0]
    )


def draw_example(source: PictureSource, rng: Rng) -> Example:
    """Draw a picture, or in more than a third of the cases a frame pair of a video."""
    roll = rng.random()
    if roll > VIDEO_SHARE:
        if roll > 1 - MORE_FASHION_SHARE:
            pixels, facts = source.fashion_picture(rng)
        elif roll > 1 - MORE_FASHION_SHARE - MORE_WORDS_SHARE:
            pixels, facts = images.word_picture(rng)
            pixels = images.wear(pixels, rng)
        else:
            pixels, facts = source.draw(rng)
        return Example((pixels,), (facts, facts))
    video = videos.digits_video(rng) if rng.random() < MORE_DIGITS_SHARE else videos.any_video(rng)
    first, gap = float(rng.uniform(0, max(video.duration_s - 1.3, 0.01))), float(rng.uniform(0.25, 1.2))
    if video.facts.order and rng.random() < CHANGE_SHARE:
        changes = [second for _, second in video.facts.order[1:]]
        first = changes[int(rng.integers(len(changes)))] - gap * float(rng.uniform(0.02, 0.98))
    seconds = (first, min(first + gap, video.duration_s - 0.01))
    frames = tuple(video.frame(second) for second in seconds)
    moving = video.facts.kind in ("motion", "still")
    before, after = (
        _pair_facts(video, second, _centre(frame) if moving else None)
        for frame, second in zip(frames, seconds)
    )
    worn = tuple(images.wear(frame, rng) for frame in frames) if rng.random() < 0.6 else frames
    return Example(worn, (before, after), video.facts.direction if moving else None)


def _class_index(facts: ImageFacts) -> int:
    names: dict[str, Sequence[str]] = {"fashion": FASHION, "word": WORDS, "plain": COLOURS}
    return int(facts.label) if facts.kind == "digit" else list(names[facts.kind]).index(facts.label)


def _cells(facts: ImageFacts, grid: Grid, merge: int) -> Tensor:
    rows, columns = grid[1] // merge, grid[2] // merge
    cells = torch.zeros(rows * columns, dtype=torch.long)
    for shape in facts.shapes:
        row, column = min(int(shape.y * rows), rows - 1), min(int(shape.x * columns), columns - 1)
        cells[row * columns + column] = (
            1 + SHAPES.index(shape.name) * len(COLOURS) + COLOURS.index(shape.colour)
        )
    return cells


class VisionHeads(nn.Module):
    """Linear heads on tokens (cells, once per frame of a pair) and on their mean (kind, class, motion)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        cells = 1 + len(SHAPES) * len(COLOURS)
        self.norm = nn.LayerNorm(width)
        self.cells = nn.ModuleList(nn.Linear(width, cells) for _ in range(2))
        self.kinds = nn.Linear(width, len(KINDS))
        self.motions = nn.Linear(width, len(MOTIONS))
        self.classes = nn.ModuleDict({name: nn.Linear(width, count) for name, count in CLASSES.items()})

    def loss(
        self, tokens: Tensor, grids: Sequence[Grid], examples: Sequence[Example], merge: int
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the summed loss and the accuracies of the first frame."""
        lens = [grid[0] * grid[1] * grid[2] // merge**2 for grid in grids]
        normed = self.norm(tokens)
        means = torch.stack([part.mean(0) for part in normed.split(lens)])
        total = tokens.new_zeros(())
        report: dict[str, float] = {}
        moving = [index for index, example in enumerate(examples) if example.motion is not None]
        if moving:
            ways = torch.tensor([MOTIONS.index(examples[index].motion or "") for index in moving])
            scores = self.motions(means[moving])
            total = total + 2 * F.cross_entropy(scores, ways, reduction="sum") / len(examples)
            report["motion"] = float((scores.argmax(-1) == ways).float().mean())
        # The first frame's kind and class, as the entries of an order are told: asked for both frames'
        # digits, a tower of this size learns neither well.
        first = [example.facts[0] for example in examples]
        kinds = torch.tensor([KINDS.index(fact.kind) for fact in first])
        total = total + F.cross_entropy(self.kinds(means), kinds)
        for name, head in self.classes.items():
            chosen = [index for index, fact in enumerate(first) if fact.kind == name]
            if not chosen:
                continue
            labels = torch.tensor([_class_index(first[index]) for index in chosen])
            scores = head(means[chosen])
            losses = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=0.05)
            total = total + 2 * losses / len(examples)
            right = (scores.argmax(-1) == labels).float()
            report[name] = float(right.mean())
            if name == "digit":
                report |= _pair_report(right, [examples[index] for index in chosen])
        for frame in range(2):
            facts = [example.facts[frame] for example in examples]
            cells = torch.cat([_cells(fact, grid, merge) for fact, grid in zip(facts, grids)])
            rows = torch.tensor([f.kind == "shapes" for f in facts]).repeat_interleave(torch.tensor(lens))
            if rows.any():
                scores = self.cells[frame](normed[rows])
                wanted = cells[rows]
                total = total + F.cross_entropy(scores, wanted, reduction="sum") / len(facts) / 2
                if frame == 0 and bool((wanted > 0).any()):
                    report["cells"] = float((scores.argmax(-1) == wanted)[wanted > 0].float().mean())
        return total, report


def _pair_report(right: Tensor, examples: Sequence[Example]) -> dict[str, float]:
    """Return how many digits of frame pairs are right, apart for pairs of one scene and of two."""
    report = {}
    for name, mixed in (("video_digit", False), ("mixed_digit", True)):
        rows = [
            index
            for index, example in enumerate(examples)
            if len(example.frames) == 2 and (example.facts[0] != example.facts[1]) == mixed
        ]
        if rows:
            report[name] = float(right[rows].mean())
    return report


def batch_patches(examples: Sequence[Example], cfg: ProcessorConfig) -> tuple[Tensor, list[Grid]]:
    """Cut a batch of pictures and frame pairs."""
    parts, grids = [], []
    for example in examples:
        kind = "video" if len(example.frames) == 2 else "image"
        limits = getattr(cfg, f"{kind}_min_pixels"), getattr(cfg, f"{kind}_max_pixels")
        patches, grid = frames_patches(example.frames, cfg, *limits)
        parts.append(patches)
        grids.append(grid)
    return torch.cat(parts), grids


def train_vision(
    folder: Path, vision: VisionConfig, processor: ProcessorConfig, steps: int, rate: float, seed: int
) -> None:
    """Run the stage in `folder`; a tower that was trained before gets its new heads settled first."""
    torch.manual_seed(seed)
    tower, heads = VisionTower(vision), VisionHeads(vision.out_hidden_size)
    source = PictureSource("train")

    def step(_: int, rng: Rng) -> tuple[Tensor, dict[str, float]]:
        examples = [draw_example(source, rng) for _ in range(BATCH)]
        pixels, grids = batch_patches(examples, processor)
        return heads.loss(tower(pixels, grids), grids, examples, vision.spatial_merge_size)

    if starts_from_weights(folder):
        settle_head(folder, {"tower": tower}, {"heads": heads}, step, seed)
    loop = Loop("vision", folder, {"tower": tower, "heads": heads}, LoopConfig(steps, rate, seed=seed))
    loop.run(step)
