"""Measure a nano checkpoint on held-out material: `python -m nano.evaluate [--checkpoint DIR] [--json]`.

Used by people and tests. Files are loaded by the code that serves them; an answer counts as right only
if greedy decoding would write exactly it, its end token included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.config import ProcessorConfig
from transom.encoder.models.loader import load_audio, load_vision
from transom.encoder.models.vision import VisionTower
from transom.llm.model.attention import PackedAttention
from transom.llm.model.loader import load_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.nano.data import answers, datasets, dialogues, images, sounds, texts, videos
from transom.nano.data.dialogues import Media, Message, assistant, user
from transom.nano.data.facts import ImageFacts
from transom.nano.data.sounds import SpokenDigits
from transom.nano.export import CHECKPOINT
from transom.nano.prompts import Prompt, PromptWriter
from transom.nano.stages.joint import MediaEmbedder, mtp_loss
from transom.nano.stages.language import Batch, pack
from transom.nano.stages.pools import PoolBuilder, Pools, expand_entry
from transom.nano.stages.vision import PictureSource
from transom.nano.videofile import through_h264

Rng = np.random.Generator
BATCH_TOKENS = 6000
SEED = 2024


@dataclass(frozen=True)
class Result:
    """Share of right answers of one task."""

    task: str
    right: int
    count: int
    target: float | None = None

    @property
    def share(self) -> float:
        return self.right / self.count if self.count else 0.0


class Nano:
    """The models of a checkpoint and what is needed to ask them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        language = load_language_model(folder, dtype=torch.float32, device="cpu")
        assert isinstance(language, MiMoV2ForCausalLM)
        self.language = language
        self.tower: VisionTower = load_vision(folder, torch.float32, "cpu")
        self.audio: AudioEncoder = load_audio(folder, torch.float32, "cpu")
        self.processor = ProcessorConfig.from_folder(folder)
        self.writer = PromptWriter(folder, expand_entry)

    def builder(self, spoken: SpokenDigits) -> PoolBuilder:
        """Return a fresh collection of media."""
        return PoolBuilder(self.tower, self.audio, self.processor, spoken)

    @torch.no_grad()
    def right_answers(self, asked: Sequence[list[Message]], pools: Pools) -> list[bool]:
        """Say of each dialogue whether greedy decoding writes its last answer."""
        prompts = [self.writer.write(messages) for messages in asked]
        verdicts: dict[int, bool] = {}
        for group in _by_tokens(prompts):
            batch = pack([prompts[index] for index in group])
            order = sorted(group, key=lambda index: len(prompts[index].ids))
            x = MediaEmbedder(self.writer, pools, self.audio)(self.language, batch)
            hidden = self.language(x, batch.positions, PackedAttention(batch.lens))
            for index, first in zip(order, _starts(batch.lens), strict=True):
                start, end = prompts[index].answers[-1]
                best = self.language.logits(hidden[first + start - 1 : first + end - 1]).argmax(-1)
                verdicts[index] = best.tolist() == prompts[index].ids[start:end]
        return [verdicts[index] for index in range(len(prompts))]

    @torch.no_grad()
    def answer(self, messages: list[Message], pools: Pools, longest: int = 64) -> str:
        """Decode greedily."""
        prompt = self.writer.write(messages, generate=True)
        ids = list(prompt.ids)
        embed = MediaEmbedder(self.writer, pools, self.audio)
        while len(ids) < len(prompt.ids) + longest:
            row = torch.tensor([len(ids) - 1])
            packed = Batch(
                [Prompt(ids, prompt.media, [])],
                torch.tensor(ids),
                torch.arange(len(ids)),
                [len(ids)],
                row,
                row,
                row,
            )
            hidden = self.language(
                embed(self.language, packed), packed.positions, PackedAttention(packed.lens)
            )
            ids.append(int(self.language.logits(hidden[-1:]).argmax()))
            if ids[-1] in self.language.config.eos_token_ids:
                break
        return self.writer.tokenizer.decode(ids[len(prompt.ids) :])

    @torch.no_grad()
    def draft_accuracy(self, asked: Sequence[list[Message]], pools: Pools) -> list[float]:
        """Return how often each draft module names the right token of an answer."""
        sums = np.zeros(len(self.language.mtp))
        prompts = [self.writer.write(messages) for messages in asked]
        groups = _by_tokens(prompts)
        for group in groups:
            batch = pack([prompts[index] for index in group])
            attention = PackedAttention(batch.lens)
            x = MediaEmbedder(self.writer, pools, self.audio)(self.language, batch)
            hidden = self.language(x, batch.positions, attention)
            report = mtp_loss(self.language, batch, x, hidden, attention)[1]
            sums += [report[f"draft{k}"] for k in range(len(sums))]
        return [float(value) for value in sums / len(groups)]


def _starts(lens: Sequence[int]) -> list[int]:
    return [sum(lens[:index]) for index in range(len(lens))]


def _by_tokens(prompts: Sequence[Prompt]) -> list[list[int]]:
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    groups: list[list[int]] = [[]]
    total = 0
    for index in order:
        if groups[-1] and total + len(prompts[index].ids) > BATCH_TOKENS:
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += len(prompts[index].ids)
    return groups


@dataclass
class Examiner:
    """Asks everything; `share` scales the number of questions."""

    nano: Nano
    spoken: SpokenDigits
    share: float = 1.0

    def __post_init__(self) -> None:
        self.pictures = PictureSource("test")

    def count(self, full: int) -> int:
        """Scale a number of questions."""
        return max(1, int(full * self.share))

    def rng(self, task: str) -> Rng:
        """Return the generator of a task."""
        return datasets.generator(SEED, *task.encode())

    def _result(
        self, task: str, asked: Sequence[list[Message]], pools: Pools, target: float | None = None
    ) -> Result:
        return Result(task, sum(self.nano.right_answers(asked, pools)), len(asked), target)

    def _pictures(
        self,
        task: str,
        draw: Callable[[Rng], tuple[images.Pixels, ImageFacts]],
        full: int,
        target: float | None = None,
    ) -> Result:
        rng, builder = self.rng(task), self.nano.builder(self.spoken)
        entries = builder.images(draw, self.count(full), rng)
        pools = builder.pools(entries, [], [])
        asked = [_ask_about(Media("image", entry.facts, entry), rng) for entry in entries]
        return self._result(task, asked, pools, target)

    def fashion(self) -> Result:
        """Fashion-MNIST's test split."""
        rows = iter(range(10_000))
        draw = lambda rng: self.pictures.fashion_picture(rng, next(rows), varied=False)  # noqa: E731
        return self._pictures("fashion", draw, 10_000, 0.88)

    def handwritten(self) -> Result:
        """Hold-out of the handwritten digits."""
        rows = iter(range(len(self.pictures.digits)))
        draw = lambda rng: self.pictures.handwritten_picture(rng, next(rows), varied=False)  # noqa: E731
        return self._pictures("handwritten digits", draw, len(self.pictures.digits), 0.96)

    def _sounds(
        self, task: str, draw: Callable[[Rng], sounds.Sound], full: int, target: float | None = None
    ) -> Result:
        rng, builder = self.rng(task), self.nano.builder(self.spoken)
        entries = builder.sounds(draw, self.count(full), rng)
        pools = builder.pools([], entries, [])
        asked = [_ask_about(Media("audio", entry.facts, entry), rng) for entry in entries]
        return self._result(task, asked, pools, target)

    def spoken_digits(self) -> Result:
        """Free Spoken Digits' test split, each recording once."""
        recordings = iter(self.spoken.recordings)

        def draw(rng: Rng) -> sounds.Sound:
            recording = next(recordings)
            return sounds.digits_sound([recording.samples], [recording.digit], rng, varied=False)

        return self._sounds("spoken digits", draw, len(self.spoken.recordings), 0.95)

    def _videos(
        self,
        task: str,
        draw: Callable[[Rng], videos.Video],
        full: int,
        target: float | None = None,
        sound: float = 0.0,
    ) -> Result:
        rng, builder = self.rng(task), self.nano.builder(self.spoken)
        entries = [builder.video(through_h264(draw(rng)), rng, sound) for _ in range(self.count(full))]
        pools = builder.pools([], [], entries)
        asked = [_ask_about(Media("video", entry.facts, entry), rng) for entry in entries]
        return self._result(task, asked, pools, target)

    def recall(self, tokens: int, full: int, target: float | None = None) -> Result:
        """Recall of a fact in about `tokens` tokens of other text."""
        task = f"recall at {tokens} tokens"
        rng = self.rng(task)
        asked = [dialogues.recall_dialogue(rng, int(tokens * 3.1)) for _ in range(self.count(full))]
        return self._result(task, asked, self.nano.builder(self.spoken).pools([], [], []), target)

    def small_talk(self) -> Result:
        """Every small-talk question as it stands in the list."""
        pairs = [(question, answer) for questions, answer in texts.SMALL_TALK for question in questions]
        asked = [[{"role": "user", "content": question}, assistant(answer)] for question, answer in pairs]
        return self._result(
            "who are you, small talk", asked, self.nano.builder(self.spoken).pools([], [], [])
        )

    def text(self) -> Result:
        """Copying, counting, sums and short recall."""
        rng = self.rng("text")
        asked = [dialogues.text_dialogue(rng) for _ in range(self.count(300))]
        return self._result(
            "copying, counting, sums", asked, self.nano.builder(self.spoken).pools([], [], [])
        )

    def mixed_pools(self) -> Pools:
        """A small pool of everything, for dialogues about several items."""
        rng, builder = self.rng("mixed"), self.nano.builder(self.spoken)
        pictures = builder.images(self.pictures.draw, 600, rng)
        heard = builder.sounds(lambda r: sounds.any_sound(self.spoken, r), 300, rng)
        return builder.pools(pictures, heard, [builder.video(videos.any_video(rng), rng) for _ in range(60)])

    def all(self) -> list[Result]:
        """Ask everything."""
        mixed = self.mixed_pools()
        rng = self.rng("pairs")
        pairs = [dialogues.pair_dialogue(mixed, rng) for _ in range(self.count(300))]
        follow = [_follow_up(mixed, rng) for _ in range(self.count(200))]
        return [
            self._pictures("one shape", lambda rng: images.shapes_picture(rng, count=1), 500, 0.97),
            self._pictures(
                "several shapes", lambda rng: images.shapes_picture(rng, count=int(rng.integers(2, 5))), 500
            ),
            self._pictures("plain colour", images.plain_picture, 200),
            self.handwritten(),
            self._pictures("printed digits", images.printed_digit_picture, 300),
            self._pictures("printed words", images.word_picture, 500),
            self.fashion(),
            self.spoken_digits(),
            self._sounds(
                "rows of spoken digits",
                lambda rng: self.spoken.sound(rng, int(rng.integers(2, 6)), varied=False),
                300,
            ),
            self._sounds("tones", sounds.tones_sound, 300),
            self._videos("motion", videos.motion_video, 100, 0.95),
            self._videos("order of colours", videos.colours_video, 100, 0.95),
            self._videos("order of digits", videos.digits_video, 200, 0.95),
            self._videos("videos with sound", videos.any_video, 40, sound=1.0),
            *(self.recall(tokens, 100, 0.99 if tokens == 2000 else None) for tokens in (100, 500, 2000)),
            self.small_talk(),
            self.text(),
            self._result("two items", pairs, mixed),
            self._result("follow-up questions", follow, mixed),
            self._pictures("out-of-scope pictures", images.unknown_picture, 200),
            self._sounds(
                "out-of-scope sounds", lambda rng: sounds.unknown_sound(rng, self.spoken.voices), 200
            ),
        ]

    def drafts(self) -> list[float]:
        """Accuracy of the draft modules over mixed dialogues."""
        mixed, rng = self.mixed_pools(), self.rng("drafts")
        asked = [dialogues.media_dialogue(mixed, rng, "image") for _ in range(self.count(200))]
        asked += [dialogues.text_dialogue(rng) for _ in range(self.count(200))]
        return self.nano.draft_accuracy(asked, mixed)


def _ask_about(media: Media, rng: Rng) -> list[Message]:
    asked, answer = dialogues.ask(media.facts, rng)
    return [user(rng, [media], asked), assistant(answer)]


def _follow_up(pools: Pools, rng: Rng) -> list[Message]:
    item = pools.image(rng)
    first, second = dialogues.ask(item.facts, rng), answers.ask_image(item.facts, rng)  # type: ignore[arg-type]
    turns = [user(rng, [item], first[0]), assistant(first[1])]
    return [*turns, {"role": "user", "content": second[0]}, assistant(second[1])]


def results_table(results: Sequence[Result], drafts: Sequence[float]) -> Table:
    """Return the table of a measurement."""
    table = Table("task", "right", "of", "share", "aimed at")
    for result in results:
        aim = "" if result.target is None else f"{result.target:.0%}"
        table.add_row(result.task, str(result.right), str(result.count), f"{result.share:.1%}", aim)
    for index, share in enumerate(drafts):
        table.add_row(f"draft module {index + 1}", "", "", f"{share:.1%}", "")
    return table


def main() -> None:
    """Parse the command line, ask and print."""
    parser = argparse.ArgumentParser(prog="python -m nano.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument(
        "--spoken-digits", help=f"Free Spoken Digits, a .tar.xz or a folder (or {datasets.SPOKEN_ENV})"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the questions to ask (default: all)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spoken = SpokenDigits(datasets.spoken("test", datasets.spoken_path(options.spoken_digits)))
    examiner = Examiner(Nano(options.checkpoint), spoken, options.share)
    results, drafts = examiner.all(), examiner.drafts()
    if options.json:
        tasks = {
            r.task: {"right": r.right, "count": r.count, "share": r.share, "target": r.target}
            for r in results
        }
        sys.stdout.write(json.dumps({"tasks": tasks, "drafts": drafts}) + "\n")
    else:
        Console().print(results_table(results, drafts))


if __name__ == "__main__":
    main()
