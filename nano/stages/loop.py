"""The optimisation loop that all stages share: schedule, clipping, progress, saving and resuming.

Used by training only. State is safetensors and JSON. Randomness is a function of (seed, step), so a
resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transom.nano.stages.muon import Muon

Rng = np.random.Generator
# Weights that a stage starts from, beside the state that it saves.
START = "start.safetensors"
# Until a new head says what the trained weights under it know; its gradient would be noise before.
HEAD_STEPS = 200
# One step: draw a batch with the generator, return the loss and what to report of it.
StepFn = Callable[[int, Rng], tuple[Tensor, dict[str, float]]]


# Matrices at the ends of a model, where Muon's assumption does not hold. Experts are stacked in three
# dimensions and stay with AdamW too: making 112 of them orthogonal costs as much as half a step.
_ADAM_MATRICES = (
    "lm_head",
    "patch_embed",
    "mlp.gate.weight",
    "conv1",
    "heads",
    "kinds",
    "motions",
    "cells",
    "classes",
)


@dataclass(frozen=True)
class LoopConfig:
    """The rate warms up over `warmup_steps`, then falls along a cosine to `final_share` of its peak."""

    steps: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    final_share: float = 0.02
    save_every: int = 250
    report_every: int = 50
    seed: int = 7


def learning_rate(step: int, cfg: LoopConfig) -> float:
    """Return the rate of a step: linear warm-up, then cosine to `final_share` of the peak."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.learning_rate * (
        cfg.final_share + (1 - cfg.final_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1)))
    )


def _optimizers(modules: Sequence[nn.Module], cfg: LoopConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for the rest; only matrices decay."""
    inner: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for module in modules:
        outer = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2 or id(parameter) in outer:
                free.append(parameter)
            elif parameter.ndim > 2 or any(part in name for part in _ADAM_MATRICES):
                matrices.append(parameter)
            else:
                inner.append(parameter)
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": free, "weight_decay": 0.0}]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.learning_rate, betas=(0.9, 0.98))
    return [adam, Muon(inner, cfg.learning_rate, cfg.weight_decay)] if inner else [adam]


class Loop:
    """Train `modules` in `folder`; `run` continues from the last saved step if there is one."""

    def __init__(self, name: str, folder: Path, modules: dict[str, nn.Module], cfg: LoopConfig) -> None:
        self.name, self.folder, self.modules, self.cfg = name, folder, modules, cfg
        self.optimizers = _optimizers(list(modules.values()), cfg)
        self.states = [(o, p) for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.step = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, step_fn: StepFn, on_save: Callable[[], None] | None = None) -> None:
        """Run the remaining steps, saving now and then and at the end."""
        self._resume()
        started, first = time.monotonic(), self.step
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[report]}")) as progress:
            bar = progress.add_task(self.name, total=self.cfg.steps, completed=self.step, report="")
            sums: dict[str, list[float]] = {}
            while self.step < self.cfg.steps:
                for key, value in self._one(step_fn).items():
                    sums.setdefault(key, []).append(value)
                if self.step % self.cfg.report_every == 0 or self.step == self.cfg.steps:
                    means = {key: round(sum(values) / len(values), 4) for key, values in sorted(sums.items())}
                    means["steps_per_s"] = round((self.step - first) / (time.monotonic() - started), 3)
                    self._log(means)
                    progress.update(bar, report=" ".join(f"{k} {v:g}" for k, v in means.items()))
                    sums = {}
                if self.step % self.cfg.save_every == 0 or self.step == self.cfg.steps:
                    self.save()
                    if on_save:
                        on_save()
                progress.update(bar, completed=self.step)

    def _one(self, step_fn: StepFn) -> dict[str, float]:
        rate = learning_rate(self.step, self.cfg)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        loss, report = step_fn(self.step, np.random.default_rng([self.cfg.seed, self.step]))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_([parameter for _, parameter in self.states], self.cfg.clip)
        for optimizer in self.optimizers:
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return {"loss": float(loss.detach()), **report}

    def save(self) -> None:
        """Write modules, optimiser and step; a crash in the middle leaves the previous state."""
        tensors = {}
        for name, module in self.modules.items():
            tensors.update({f"module.{name}.{key}": value for key, value in module.state_dict().items()})
        for index, (optimizer, parameter) in enumerate(self.states):
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{index}.{key}"] = value
        partial = self.folder / "state.partial"
        save_file(
            {key: value.contiguous().clone() for key, value in tensors.items()},
            partial,
            {"step": str(self.step)},
        )
        os.replace(partial, self.folder / "state.safetensors")
        (self.folder / "state.json").write_text(
            json.dumps({"step": self.step, "steps": self.cfg.steps}) + "\n"
        )

    def _resume(self) -> None:
        path = self.folder / "state.safetensors"
        if not path.exists():
            if (self.folder / START).exists():
                load_modules(self.folder, self.modules, partial=True)
            return
        tensors = load_file(path)
        load_modules(self.folder, self.modules)
        for index, (optimizer, parameter) in enumerate(self.states):
            prefix = f"optimizer.{index}."
            state = {
                key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
            }
            if state:
                optimizer.state[parameter] = state
        self.step = int(json.loads((self.folder / "state.json").read_text())["step"])

    def _log(self, means: dict[str, float]) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **means}) + "\n")


def starts_from_weights(folder: Path) -> bool:
    """Tell whether a stage has been given weights to start from and has not yet saved anything itself."""
    return (folder / START).exists() and not (folder / "state.safetensors").exists()


def settle_head(
    folder: Path, body: dict[str, nn.Module], head: dict[str, nn.Module], step_fn: StepFn, seed: int
) -> None:
    """Train a new head alone on the weights that `folder` starts from; no body has a gradient meanwhile."""
    load_modules(folder, body)
    for module in body.values():
        module.requires_grad_(False)
    settled = LoopConfig(HEAD_STEPS, 4e-3, warmup_steps=10, seed=seed + 1)
    Loop(f"head of {folder.name}", folder / "heads", head, settled).run(step_fn)
    for module in body.values():
        module.requires_grad_(True)


def load_modules(folder: Path, modules: dict[str, nn.Module], *, partial: bool = False) -> None:
    """Load modules from what a stage saved in `folder`, or else from what it was given to start from.

    With `partial`, a module that the file does not have stays as it is.
    """
    path = folder / "state.safetensors"
    tensors = load_file(path if path.exists() else folder / START)
    for name, module in modules.items():
        prefix = f"module.{name}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state or not partial:
            module.load_state_dict(state)


def save_start(folder: Path, modules: dict[str, nn.Module]) -> None:
    """Write the weights that a stage starts from, in place of new ones; what the folder held is dropped."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = {
        f"module.{name}.{key}": value.contiguous().clone()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
    save_file(tensors, folder / START)
