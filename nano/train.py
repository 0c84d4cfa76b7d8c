"""Train the nano checkpoint: `python -m nano.train STAGE` for one stage, or `all` for one after the other.

Used by people only. Each stage writes under nano/runs and continues from there when started again;
`export` turns the last results into the checkpoint folder, and `unpack` turns that folder back into
weights that every stage starts from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.config import AudioConfig, ProcessorConfig, VisionConfig
from transom.encoder.models.loader import load_audio, load_vision
from transom.encoder.models.vision import VisionTower
from transom.llm.model.loader import load_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.nano.data import datasets
from transom.nano.data.sounds import SpokenDigits
from transom.nano.export import (
    CHECKPOINT,
    Models,
    new_language_model,
    write_assets,
    write_configs,
    write_tensors,
)
from transom.nano.stages.audio import train_audio
from transom.nano.stages.joint import scale_audio, train_joint, train_mtp
from transom.nano.stages.language import train_text
from transom.nano.stages.loop import START, load_modules, save_start
from transom.nano.stages.pools import Pools, build_pools
from transom.nano.stages.vision import PictureSource, batch_patches, draw_example, train_vision

RUNS = Path(__file__).parent / "runs"
STEPS = {"vision": 10_000, "audio": 900, "text": 750, "joint": 2850, "mtp": 250}
RATES = {"vision": 2e-3, "audio": 2e-3, "joint": 2e-3, "mtp": 4e-3}


@dataclass(frozen=True)
class Run:
    """One training: its folder, seed, step counts, peak learning rates and where the recordings are."""

    runs: Path
    seed: int
    steps: dict[str, int]
    rates: dict[str, float]
    spoken_digits: str | None
    checkpoint: Path
    pool_share: float

    @property
    def assets(self) -> Path:
        """Tokenizer and configs, which all stages share."""
        return self.runs / "assets"

    def spoken(self) -> SpokenDigits:
        """Read the training recordings."""
        return SpokenDigits(datasets.spoken("train", datasets.spoken_path(self.spoken_digits)))

    def prepare(self, *, fresh: bool) -> None:
        """Write configs and a tokenizer: a new one unless one is there, or else the checkpoint's."""
        if not fresh:
            self._copy_tokenizer(self.checkpoint, self.assets)
        elif not (self.assets / "tokenizer.json").exists():
            write_assets(self.assets)
        write_configs(self.assets)

    def _copy_tokenizer(self, source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (target / name).write_bytes((source / name).read_bytes())

    def unpack(self) -> None:
        """Turn the checkpoint into weights that every stage starts from: steps and optimisers are new."""
        language = load_language_model(self.checkpoint, dtype=torch.float32, device="cpu")
        assert isinstance(language, MiMoV2ForCausalLM)
        audio = load_audio(self.checkpoint, torch.float32, "cpu")
        tower = load_vision(self.checkpoint, torch.float32, "cpu")
        save_file(tower.state_dict(), self.runs / "tower.safetensors")
        save_start(self.runs / "vision", {"tower": tower})
        save_start(self.runs / "audio_encoder", {"encoder": audio.tokenizer})
        save_start(self.runs / "audio", {"audio": audio})
        save_start(self.runs / "joint", {"language": language})
        save_start(self.runs / "mtp", {"mtp": language.mtp})

    def vision(self) -> None:
        """Stage A: the vision tower."""
        cfg = VisionConfig.from_folder(self.assets), ProcessorConfig.from_folder(self.assets)
        train_vision(self.runs / "vision", *cfg, self.steps["vision"], self.rates["vision"], self.seed)

    def audio(self) -> None:
        """Stage B: the audio path."""
        recordings, cfg = datasets.spoken_path(self.spoken_digits), AudioConfig.from_folder(self.assets)
        train_audio(self.runs, cfg, recordings, self.steps["audio"], self.rates["audio"], self.seed)

    def text(self) -> None:
        """Text stage: dialogue, copying, recall."""
        train_text(self.assets, self.runs / "text", self.steps["text"], self.seed)

    def pools(self) -> None:
        """Run the frozen towers over the training media."""
        tower, processor = (
            VisionTower(VisionConfig.from_folder(self.assets)),
            ProcessorConfig.from_folder(self.assets),
        )
        load_modules(self.runs / "vision", {"tower": tower})
        _scale_tower(tower, processor, self.seed)
        save_file(tower.state_dict(), self.runs / "tower.safetensors")
        audio = AudioEncoder(AudioConfig.from_folder(self.assets))
        load_modules(self.runs / "audio", {"audio": audio})
        pools = build_pools(tower, audio, processor, self.spoken(), self.seed, self.pool_share)
        pools.save(self.runs / "pools")

    def joint(self) -> None:
        """Stage C: everything together."""
        language, audio = new_language_model(self.assets), AudioEncoder(AudioConfig.from_folder(self.assets))
        pools = Pools.load(self.runs / "pools")
        load_modules(self.runs / "audio", {"audio": audio})
        if not (self.runs / "joint" / START).exists():
            load_modules(self.runs / "text", {"language": language})
            scale_audio(audio, pools)
        train_joint(
            self.assets,
            self.runs / "joint",
            language,
            audio,
            pools,
            self.steps["joint"],
            self.rates["joint"],
            self.seed,
            self.export,
        )

    def mtp(self) -> None:
        """Stage D: the draft modules."""
        models = self._models()
        pools = Pools.load(self.runs / "pools")
        train_mtp(
            self.assets,
            self.runs / "mtp",
            models.language,
            models.audio,
            pools,
            self.steps["mtp"],
            self.rates["mtp"],
            self.seed,
        )

    def export(self) -> None:
        """Write the checkpoint from what the stages have reached."""
        models = self._models()
        if any((self.runs / "mtp" / name).exists() for name in ("state.safetensors", START)):
            load_modules(self.runs / "mtp", {"mtp": models.language.mtp})
        self._copy_tokenizer(self.assets, self.checkpoint)
        write_configs(self.checkpoint)
        write_tensors(models, self.checkpoint)

    def _models(self) -> Models:
        language, audio = new_language_model(self.assets), AudioEncoder(AudioConfig.from_folder(self.assets))
        load_modules(self.runs / "joint", {"language": language})
        trained = (self.runs / "joint" / "state.safetensors").exists()
        load_modules(self.runs / ("joint" if trained else "audio"), {"audio": audio})
        tower = VisionTower(VisionConfig.from_folder(self.assets))
        tower.load_state_dict(load_file(self.runs / "tower.safetensors"))
        return Models(language, tower, audio)


@torch.no_grad()
def _scale_tower(tower: VisionTower, processor: ProcessorConfig, seed: int) -> None:
    """Scale the merger so that a token's values have a root mean square of a half, as words have."""
    source = PictureSource("train")
    rng = datasets.generator(seed, 6)
    pixels, grids = batch_patches([draw_example(source, rng) for _ in range(64)], processor)
    final = tower.merger.mlp[2]
    assert isinstance(final, nn.Linear)
    final.weight *= 0.5 / tower(pixels, grids).square().mean().sqrt()


def main() -> None:
    """Parse the command line and run the stages."""
    order = ("vision", "audio", "text", "pools", "joint", "mtp", "export")
    parser = argparse.ArgumentParser(prog="python -m nano.train", description=__doc__)
    parser.add_argument("stage", choices=[*order, "unpack", "all"])
    parser.add_argument(
        "--runs", type=Path, default=RUNS, help="folder of the stages' results (default: nano/runs)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="where export writes and unpack reads"
    )
    parser.add_argument("--steps", type=int, help="steps of the stage, instead of its default")
    parser.add_argument(
        "--rate", type=float, help="peak learning rate of vision, audio, joint or mtp, instead of its default"
    )
    parser.add_argument(
        "--spoken-digits", help=f"Free Spoken Digits, a .tar.xz or a folder (or {datasets.SPOKEN_ENV})"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--pool-share", type=float, default=1.0, help="share of the media that the pools hold (default: all)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = {name: options.steps or count for name, count in STEPS.items()}
    rates = {name: options.rate or rate for name, rate in RATES.items()}
    run = Run(
        options.runs,
        options.seed,
        steps,
        rates,
        options.spoken_digits,
        options.checkpoint,
        options.pool_share,
    )
    run.prepare(fresh=options.stage != "unpack")
    stages: dict[str, Callable[[], None]] = {name: getattr(run, name) for name in (*order, "unpack")}
    for name in order if options.stage == "all" else (options.stage,):
        stages[name]()


if __name__ == "__main__":
    main()
