"""Stage C and D: the language model and the audio path learn all tasks together; then the MTP modules.

Used by training only. The vision tower and the audio tokenizer are frozen and stand behind pools.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transom.encoder.models.audio import AudioEncoder
from transom.llm.model.attention import PackedAttention
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM, MTPModule
from transom.nano.data import dialogues
from transom.nano.data.dialogues import Message
from transom.nano.prompts import Prompt, PromptWriter
from transom.nano.stages.language import (
    GROUP,
    Batch,
    Grouped,
    LoadBalancer,
    draw_prompts,
    echo_prompts,
    language_loss,
    pack,
)
from transom.nano.stages.loop import Loop, LoopConfig, Rng
from transom.nano.stages.pools import Pools, expand_entry

BUDGET = 2560
# What the text stage taught must not be forgotten; filler is counted in characters.
RECALL_SHARE, ECHO_SHARE = 0.1, 0.03
LONGEST_FILLER = 7000
# With many pictures that show several shapes, a lone one is told twice.
SINGLE_SHARE = 0.3


class MediaEmbedder:
    """Embeds batches whose media come from pools."""

    def __init__(self, writer: PromptWriter, pools: Pools, audio: AudioEncoder) -> None:
        self._ids, self._pools, self._audio = writer.ids, pools, audio

    def __call__(self, model: MiMoV2ForCausalLM, batch: Batch) -> Tensor:
        """Return (tokens, hidden): words from the table, pads from the pools."""
        x = model.embed(batch.ids)
        media = [item for prompt in batch.prompts for item in prompt.media]
        if not media:
            return x
        seen = (batch.ids == self._ids.image_pad) | (batch.ids == self._ids.video_pad)
        x = x.masked_scatter(seen.unsqueeze(1), self._pools.vision_rows(media))
        codes = self._pools.sound_codes(media)
        if codes:
            heard = (batch.ids == self._ids.audio_pad).unsqueeze(1)
            x = x.masked_scatter(heard, torch.cat(self._audio.embed(codes)))
        return x


def draw_dialogue(pools: Pools, rng: Rng) -> list[Message]:
    """Draw any short dialogue, in the shares of the joint stage."""
    roll = rng.random()
    if roll < 0.32:
        return dialogues.media_dialogue(pools, rng, "image")
    if roll < 0.44:
        return dialogues.media_dialogue(pools, rng, "audio")
    if roll < 0.81:
        return dialogues.media_dialogue(pools, rng, "video")
    return dialogues.pair_dialogue(pools, rng) if roll < 0.91 else dialogues.text_dialogue(rng)


def joint_prompts(writer: PromptWriter, pools: Pools, rng: Rng, budget: int) -> list[Prompt]:
    """Draw the prompts of a group of steps: recall over filler of all lengths, copying, everything else."""

    def recall(r: Rng) -> list[Message]:
        return dialogues.recall_lesson(r, int(np.exp(r.uniform(np.log(150), np.log(LONGEST_FILLER)))))

    prompts = draw_prompts(recall, writer, rng, int(budget * RECALL_SHARE), 4500)
    prompts += echo_prompts(writer, rng, int(budget * ECHO_SHARE), 80)
    rest = int(budget * (1 - RECALL_SHARE - ECHO_SHARE))
    return prompts + draw_prompts(lambda r: draw_dialogue(pools, r), writer, rng, rest, 500)


@torch.no_grad()
def scale_audio(audio: AudioEncoder, pools: Pools) -> None:
    """Scale the projection so that a token's values have a root mean square of a half, as words have."""
    codes = [pools.codes[e.start : e.end].long() for e in pools.entries.sounds[:200]]
    size = torch.cat(audio.embed(codes)).square().mean().sqrt()
    final = audio.projection.mlp[2]
    assert isinstance(final, nn.Linear)
    final.weight *= 0.5 / size


def train_joint(
    assets: Path,
    folder: Path,
    language: MiMoV2ForCausalLM,
    audio: AudioEncoder,
    pools: Pools,
    steps: int,
    rate: float,
    seed: int,
    on_save: Callable[[], None],
) -> None:
    """Run the joint stage; `language` comes from the text stage, unless the folder holds a start.

    `audio` comes from the audio stage in any case.
    """
    torch.manual_seed(seed)
    pools.single_share = SINGLE_SHARE
    writer = PromptWriter(assets, expand_entry)
    language.mtp.requires_grad_(False)
    audio.tokenizer.requires_grad_(False)
    balancer = LoadBalancer(language)
    embed = MediaEmbedder(writer, pools, audio)
    modules: dict[str, nn.Module] = {"language": language, "audio": audio}
    loop = Loop("joint", folder, modules, LoopConfig(steps, rate, seed=seed, save_every=100))
    grouped = Grouped(seed + 1, lambda _, rng: joint_prompts(writer, pools, rng, BUDGET * GROUP))

    def step(index: int, _: Rng) -> tuple[Tensor, dict[str, float]]:
        batch = pack(grouped.prompts(index))
        loss, report = language_loss(language, batch, embed)
        report["load"] = balancer.step()
        return loss, report

    loop.run(step, on_save)


def train_mtp(
    assets: Path,
    folder: Path,
    language: MiMoV2ForCausalLM,
    audio: AudioEncoder,
    pools: Pools,
    steps: int,
    rate: float,
    seed: int,
) -> None:
    """Run the last stage: the draft modules learn to look further ahead; everything else is frozen."""
    torch.manual_seed(seed)
    writer = PromptWriter(assets, expand_entry)
    embed = MediaEmbedder(writer, pools, audio)
    language.requires_grad_(False).eval()
    language.mtp.requires_grad_(True)
    for module in language.mtp:
        # Start from the mean of what is known: the target's state and the newest token.
        half = torch.eye(language.config.hidden_size) / 2
        assert isinstance(module, MTPModule)
        module.eh_proj.weight.data.copy_(torch.cat((half, half), 1))
    loop = Loop(
        "mtp",
        folder,
        {"mtp": language.mtp},
        LoopConfig(steps, rate, warmup_steps=15, seed=seed, save_every=50),
    )
    grouped = Grouped(seed + 2, lambda _, rng: joint_prompts(writer, pools, rng, BUDGET * GROUP))

    def step(index: int, _: Rng) -> tuple[Tensor, dict[str, float]]:
        batch = pack(grouped.prompts(index))
        attention = PackedAttention(batch.lens)
        with torch.no_grad():
            x = embed(language, batch)
            hidden = language(x, batch.positions, attention)
        return mtp_loss(language, batch, x, hidden, attention)

    loop.run(step)


def mtp_loss(
    language: MiMoV2ForCausalLM, batch: Batch, x: Tensor, hidden: Tensor, attention: PackedAttention
) -> tuple[Tensor, dict[str, float]]:
    """Return the mean loss of the modules on answer tokens, and how often each is right.

    A token that a shift pulls in from the next packed prompt reaches no row that counts: rows that
    predict past the end of an answer are left out.
    """
    total = x.new_zeros(())
    report = {}
    ends = torch.tensor(batch.lens).cumsum(0)
    prompt_of = torch.bucketize(torch.arange(len(batch.ids)), ends, right=True)
    is_answer = torch.zeros(len(batch.ids), dtype=torch.bool)
    is_answer[batch.rows + 1] = True
    for k, module in enumerate(language.mtp):
        states = module(x.roll(-1 - k, 0), hidden, batch.positions, attention)
        rows = torch.arange(len(batch.ids) - 2 - k)
        rows = rows[is_answer[rows + 2 + k] & (prompt_of[rows] == prompt_of[rows + 2 + k])]
        logits = language.logits(states[rows])
        targets = batch.ids[rows + 2 + k]
        total = total + F.cross_entropy(logits, targets) / len(language.mtp)
        report[f"draft{k}"] = float((logits.argmax(-1) == targets).float().mean())
    return total, report
