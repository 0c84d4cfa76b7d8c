"""Train the nano checkpoint: `python -m nano.train STAGE` for one stage, or `all`.

Used by people only. Each stage writes under nano/runs/STAGE and continues from there; `export` turns
the last results into the checkpoint folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from transom.encoder.models.config import ProcessorConfig, VisionConfig
from transom.nano import config
from transom.nano.stages.vision import train_vision

RUNS = Path(__file__).parent / "runs"


def main() -> None:
    """Parse the command line and run the stage."""
    parser = argparse.ArgumentParser(prog="python -m nano.train", description=__doc__)
    parser.add_argument("stage", choices=["vision"])
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the stages' results (default: nano/runs)")
    parser.add_argument("--steps", type=int, help="steps of the stage")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    processor = ProcessorConfig.from_dict(config.processor_config({}))
    vision = VisionConfig.from_dict(config.vision_config())
    train_vision(options.runs / "vision", vision, processor, options.steps or 7000, options.seed)


if __name__ == "__main__":
    main()
