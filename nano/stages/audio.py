"""Stage B: teach the audio path to hear: tokenizer encoder, its codebooks, then the group encoder.

Used by training only. The encoder says what is heard in every 40 ms frame; its features are clustered into
residual codebooks, which stay frozen; the group encoder says the same from the codes alone, so that the
language model later starts from tokens that carry the answer. The heads are thrown away.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.audio_tokenizer import AudioTokenizerEncoder
from transom.encoder.models.config import AudioConfig
from transom.nano.data import datasets
from transom.nano.data.sounds import DIGIT_BASE, LABEL_COUNT, QUIET, RATE, Sound, SpokenDigits, any_sound
from transom.nano.media import sound_mel
from transom.nano.stages.loop import (
    Loop,
    LoopConfig,
    Rng,
    load_modules,
    save_start,
    settle_head,
    starts_from_weights,
)

FRAME_SAMPLES = RATE // 25
# The encoder is causal and needs a moment of a sound before it can name it.
DELAY_FRAMES = 2
BATCH = 24
CODEBOOK_SOUNDS = 2500
KMEANS_ROUNDS = 20


def frame_labels(sound: Sound, frames: int) -> tuple[Tensor, Tensor]:
    """Return the label of each 25 Hz frame and its weight: the beginning of a digit tells little."""
    labels = torch.full((frames,), QUIET)
    weights = torch.ones(frames)
    for start, end, label in sound.spans:
        first = start // FRAME_SAMPLES + DELAY_FRAMES
        last = max(end // FRAME_SAMPLES + 1, first + 1)
        labels[first:last] = label
        if label >= DIGIT_BASE:
            early = first + (last - first) // 3
            weights[first:early] = 0.15
    return labels, weights


def _draw_sounds(spoken: SpokenDigits, rng: Rng, count: int) -> tuple[list[Sound], list[Tensor]]:
    sounds = [any_sound(spoken, rng) for _ in range(count)]
    return sounds, [sound_mel(sound.samples) for sound in sounds]


def _weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.05)
    return (losses * weights).sum() / weights.sum()


def _accuracy(logits: Tensor, labels: Tensor, weights: Tensor) -> dict[str, float]:
    right = (logits.argmax(-1) == labels).float()
    spoken = (labels >= DIGIT_BASE) & (weights > 0.5)
    return {
        "frames": float(right.mean()),
        "digits": float(right[spoken].mean()) if bool(spoken.any()) else 1.0,
    }


class FrameHead(nn.Module):
    """Names what is heard in a frame or token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, LABEL_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, labels)."""
        out: Tensor = self.linear(self.norm(x))
        return out


def train_tokenizer_encoder(
    folder: Path, cfg: AudioConfig, spoken: SpokenDigits, steps: int, rate: float, seed: int
) -> None:
    """Train the tokenizer's encoder on frame labels."""
    torch.manual_seed(seed)
    encoder, head = AudioTokenizerEncoder(cfg.tokenizer), FrameHead(cfg.tokenizer.d_model)

    def step(_: int, rng: Rng) -> tuple[Tensor, dict[str, float]]:
        sounds, mels = _draw_sounds(spoken, rng, BATCH)
        features = encoder.features([_vary_mel(mel, rng) for mel in mels])
        labelled = [frame_labels(sound, len(part)) for sound, part in zip(sounds, features)]
        labels, weights = (torch.cat([pair[i] for pair in labelled]) for i in range(2))
        logits = head(torch.cat(features))
        return _weighted_loss(logits, labels, weights), _accuracy(logits, labels, weights)

    if starts_from_weights(folder):
        settle_head(folder, {"encoder": encoder}, {"head": head}, step, seed)
    modules: dict[str, nn.Module] = {"encoder": encoder, "head": head}
    Loop("audio encoder", folder, modules, LoopConfig(steps, rate, seed=seed)).run(step)


def _vary_mel(mel: Tensor, rng: Rng) -> Tensor:
    """Shift the level, warp the frequencies, hide bands and moments: six speakers differ too little."""
    mel = mel + float(rng.normal(0, 0.4))
    if rng.random() < 0.5:
        mel = _warp(mel, float(rng.uniform(0.9, 1.1)))
    quiet = mel.min()
    for _ in range(int(rng.integers(0, 3))):
        low = int(rng.integers(0, mel.shape[1] - 12))
        mel[:, low : low + int(rng.integers(2, 12))] = quiet
    if rng.random() < 0.3:
        first = int(rng.integers(0, len(mel)))
        mel[first : first + int(rng.integers(2, 9))] = quiet
    return mel


def _warp(mel: Tensor, factor: float) -> Tensor:
    """Stretch (frames, mels) along the mels, as a longer or shorter vocal tract does."""
    count = mel.shape[1]
    places = (torch.arange(count) * factor).clamp_max(count - 1)
    low = places.floor().long()
    share = places - low
    return mel[:, low] * (1 - share) + mel[:, (low + 1).clamp_max(count - 1)] * share


@torch.no_grad()
def fit_codebooks(encoder: AudioTokenizerEncoder, spoken: SpokenDigits, seed: int) -> float:
    """Cluster the features of training sounds level by level; return the share of variance kept.

    Codebooks that were fitted before move from where they are, so that most codes keep their meaning; empty
    ones start at random features.
    """
    rng = np.random.default_rng([seed, 3])
    features = []
    for _ in range(CODEBOOK_SOUNDS // 50):
        _, mels = _draw_sounds(spoken, rng, 50)
        features += encoder.features(mels)
    residual = torch.cat(features)
    variance = float((residual - residual.mean(0)).square().sum())
    for index, size in enumerate(encoder.cfg.codebook_size):
        book = encoder.quantizer.codebook(index)
        start = residual[torch.from_numpy(rng.choice(len(residual), size, replace=False))]
        book.copy_(_kmeans(residual, book.clone() if bool(book.any()) else start))
        nearest = torch.cdist(residual, book).argmin(1)
        residual = residual - book[nearest]
    return 1 - float(residual.square().sum()) / variance


def _kmeans(points: Tensor, centres: Tensor) -> Tensor:
    for _ in range(KMEANS_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=len(centres)).unsqueeze(1)
        # A centre without points stays where it is.
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres


def train_group_encoder(
    folder: Path,
    audio: AudioEncoder,
    spoken: SpokenDigits,
    steps: int,
    rate: float,
    seed: int,
    pool: int = 10_000,
) -> None:
    """Train speech embeddings, group encoder and projection on the labels of whole tokens."""
    rng = np.random.default_rng([seed, 4])
    codes: list[Tensor] = []
    labels: list[tuple[Tensor, Tensor]] = []
    for _ in range(pool // 50):
        sounds, mels = _draw_sounds(spoken, rng, 50)
        drawn = audio.tokenize(mels)
        codes += drawn
        labels += [
            _token_labels(sound, len(part), audio.cfg.group_size) for sound, part in zip(sounds, drawn)
        ]
    head = FrameHead(audio.cfg.out_hidden_size)

    def step(_: int, step_rng: Rng) -> tuple[Tensor, dict[str, float]]:
        chosen = step_rng.integers(0, len(codes), 48)
        logits = head(torch.cat(audio.embed([codes[i] for i in chosen])))
        wanted, weights = (torch.cat([labels[i][part] for i in chosen]) for part in range(2))
        return _weighted_loss(logits, wanted, weights), _accuracy(logits, wanted, weights)

    if starts_from_weights(folder):
        settle_head(folder, {"audio": audio}, {"head": head}, step, seed)
    audio.tokenizer.requires_grad_(False)
    modules: dict[str, nn.Module] = {"audio": audio, "head": head}
    Loop("group encoder", folder, modules, LoopConfig(steps, rate, seed=seed)).run(step)


def _token_labels(sound: Sound, frames: int, group: int) -> tuple[Tensor, Tensor]:
    labels, weights = frame_labels(sound, frames)
    missing = -frames % group
    labels = torch.cat((labels, labels[-1:].expand(missing))).view(-1, group)
    weights = torch.cat((weights, weights[-1:].expand(missing))).view(-1, group)
    # A token is named after the last of its frames that is not quiet.
    order = torch.arange(1, group + 1) * (labels != QUIET)
    best = order.argmax(1, keepdim=True)
    return labels.gather(1, best).squeeze(1), weights.gather(1, best).squeeze(1)


def train_audio(runs: Path, cfg: AudioConfig, recordings: Path, steps: int, rate: float, seed: int) -> None:
    """Run the stage: encoder, codebooks, group encoder; the last one's folder holds everything."""
    spoken = SpokenDigits(datasets.spoken("train", recordings))
    train_tokenizer_encoder(runs / "audio_encoder", cfg, spoken, steps, 0.75 * rate, seed)
    torch.manual_seed(seed)
    audio, again = AudioEncoder(cfg), starts_from_weights(runs / "audio")
    if again:
        load_modules(runs / "audio", {"audio": audio})
    load_modules(runs / "audio_encoder", {"encoder": audio.tokenizer})
    fit_codebooks(audio.tokenizer, spoken, seed)
    if again:
        save_start(runs / "audio", {"audio": audio})
    train_group_encoder(runs / "audio", audio, spoken, steps, rate, seed)
