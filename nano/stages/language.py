"""Batches and loss of the language model, shared by the text stage and the joint stage.

Used by training only. Loss is on answers; the experts' load is balanced through the correction bias,
which the loss never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from transom.llm.model.attention import PackedAttention
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM, Router
from transom.nano.data import dialogues
from transom.nano.data.dialogues import Message
from transom.nano.export import new_language_model
from transom.nano.prompts import Prompt, PromptWriter
from transom.nano.stages.copying import plant_copying
from transom.nano.stages.loop import Loop, LoopConfig

Rng = np.random.Generator
BALANCE_RATE = 0.002
GROUP = 8
ECHO_SHARE = 0.35
Embed = Callable[[MiMoV2ForCausalLM, "Batch"], Tensor]


@dataclass(frozen=True)
class Batch:
    """Packed prompts; row `rows[i]` predicts `targets[i]`."""

    prompts: list[Prompt]
    ids: Tensor
    positions: Tensor
    lens: list[int]
    rows: Tensor
    targets: Tensor
    weights: Tensor


def pack(prompts: Sequence[Prompt]) -> Batch:
    """Pack prompts, sorted by length; each answer of a prompt weighs the same, whatever its length."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
    lens = [len(prompt.ids) for prompt in ordered]
    rows: list[int] = []
    weights: list[float] = []
    first = 0
    for prompt, length in zip(ordered, lens, strict=True):
        for start, end in prompt.answers:
            rows += range(first + start - 1, first + end - 1)
            weights += [(end - start) ** -0.5] * (end - start)
        first += length
    ids = torch.tensor([token for prompt in ordered for token in prompt.ids])
    index = torch.tensor(rows)
    share = torch.tensor(weights)
    positions = torch.cat([torch.arange(length) for length in lens])
    return Batch(ordered, ids, positions, lens, index, ids[index + 1], share / share.sum())


def embed_text(model: MiMoV2ForCausalLM, batch: Batch) -> Tensor:
    """Embed a batch that has no media."""
    return model.embed(batch.ids)


class LoadBalancer:
    """Steps each router's correction bias towards an even load, as the loads are seen."""

    def __init__(self, model: MiMoV2ForCausalLM) -> None:
        self._loads: dict[Router, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._count)

    def _count(self, router: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        if router.training:
            self._loads[router] = torch.bincount(
                output[1].flatten(), minlength=router.weight.shape[0]
            ).float()

    def step(self) -> float:
        """Step all biases; return the largest share that one expert got, in units of the even share."""
        worst = 0.0
        for router, load in self._loads.items():
            router.e_score_correction_bias += BALANCE_RATE * torch.sign(load.mean() - load)
            worst = max(worst, float(load.max() / load.mean()))
        self._loads = {}
        return worst


def language_loss(model: MiMoV2ForCausalLM, batch: Batch, embed: Embed) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted answer loss and the share of answer tokens that greedy choice gets right."""
    hidden = model(embed(model, batch), batch.positions, PackedAttention(batch.lens))
    logits = model.logits(hidden[batch.rows])
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    right = (logits.detach().argmax(-1) == batch.targets).float().mean()
    return (losses * batch.weights).sum(), {"right": float(right)}


def draw_prompts(
    draw: Callable[[Rng], list[Message]], writer: PromptWriter, rng: Rng, budget: int, longest: int
) -> list[Prompt]:
    """Draw prompts until `budget` tokens are reached; longer ones than `longest` are dropped."""
    prompts: list[Prompt] = []
    total = 0
    while total < budget:
        prompt = writer.write(draw(rng))
        if len(prompt.ids) <= longest:
            prompts.append(prompt)
            total += len(prompt.ids)
    return prompts


class Grouped:
    """Draws prompts for GROUP steps at once and deals them out by length: even lengths batch cheaply.

    What a step gets depends on (seed, step) only, so that a resumed run sees the same batches.
    """

    def __init__(self, seed: int, draw: Callable[[int, Rng], list[Prompt]]) -> None:
        self._seed, self._draw = seed, draw
        self._group, self._batches = -1, list[list[Prompt]]()

    def prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of a step."""
        group = step // GROUP
        if group != self._group:
            rng = np.random.default_rng([self._seed, group, 1])
            drawn = sorted(self._draw(step, rng), key=lambda prompt: len(prompt.ids))
            self._batches = _split_evenly(drawn, GROUP)
            order = rng.permutation(GROUP)
            self._batches = [self._batches[int(index)] for index in order]
            self._group = group
        return self._batches[step % GROUP]


def _split_evenly(prompts: Sequence[Prompt], count: int) -> list[list[Prompt]]:
    """Cut into `count` runs of about as many tokens each, none of them empty."""
    ends = np.cumsum([len(prompt.ids) for prompt in prompts])
    cuts = [
        0,
        *(int(np.searchsorted(ends, ends[-1] * part / count)) for part in range(1, count)),
        len(prompts),
    ]
    for index in range(1, count):
        cuts[index] = min(max(cuts[index], cuts[index - 1] + 1), len(prompts) - count + index)
    return [list(prompts[start:end]) for start, end in pairwise(cuts)]


def _no_media(*_: Any) -> list[int]:
    raise AssertionError("the text stage draws no media")


def echo_prompts(writer: PromptWriter, rng: Rng, budget: int, longest: int) -> list[Prompt]:
    """Write runs of random tokens twice, the second one as an answer.

    Copying from anywhere is what recall is made of, and nothing teaches it as quickly.
    """
    words = writer.tokenizer.token_id("<|endoftext|>")
    assert words is not None
    prompts: list[Prompt] = []
    total = 0
    while total < budget:
        size = int(np.exp(rng.uniform(np.log(4), np.log(longest))))
        run = rng.integers(0, words, size).tolist()
        prompts.append(Prompt(run + run, [], [(size + 1, 2 * size)]))
        total += 2 * size
    return prompts


def text_prompts(writer: PromptWriter, rng: Rng, done: float, budget: int) -> list[Prompt]:
    """Draw short dialogues, and recall over filler that grows as training goes on."""
    longest = 100 + 3000 * done**1.5
    recalls = draw_prompts(
        lambda r: dialogues.recall_dialogue(r, int(r.uniform(0.3, 1.0) * longest)),
        writer,
        rng,
        int(budget * 0.3),
        1600,
    )
    echoes = echo_prompts(writer, rng, int(budget * ECHO_SHARE), 80)
    rest = budget - int(budget * (0.3 + ECHO_SHARE))
    return recalls + echoes + draw_prompts(dialogues.text_dialogue, writer, rng, rest, 300)


def train_text(checkpoint: Path, folder: Path, steps: int, seed: int, budget: int = 2560) -> None:
    """Run the text stage: the language model alone learns dialogue, copying and recall."""
    torch.manual_seed(seed)
    writer = PromptWriter(checkpoint, _no_media)
    model = new_language_model(checkpoint)
    plant_in(model, writer, seed)
    model.mtp.requires_grad_(False)
    balancer = LoadBalancer(model)
    loop = Loop("text", folder, {"language": model}, LoopConfig(steps, 2e-3, final_share=0.4, seed=seed))
    grouped = Grouped(seed, lambda step, rng: text_prompts(writer, rng, step / steps, budget * GROUP))

    def step(index: int, _: Rng) -> tuple[Tensor, dict[str, float]]:
        batch = pack(grouped.prompts(index))
        loss, report = language_loss(model, batch, embed_text)
        report["load"] = balancer.step()
        return loss, report

    loop.run(step)


def plant_in(model: MiMoV2ForCausalLM, writer: PromptWriter, seed: int) -> None:
    """Plant the copying circuit, fitted to a batch of text."""
    batch = pack(text_prompts(writer, np.random.default_rng([seed, 9]), 0.3, 5000))
    attention = PackedAttention(batch.lens)

    def run() -> Tensor:
        hidden: Tensor = model(model.embed(batch.ids), batch.positions, attention)
        return hidden

    plant_copying(model, batch.ids, run, torch.Generator().manual_seed(seed))
