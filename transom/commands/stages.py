"""`transom gateway | encoder | prefill | decode`: run one stage process.

Config classes are imported eagerly (they are free of torch), stage classes when the stage starts.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from transom.commands.base import Parser, examples
from transom.config import StageConfig, add_flags, config_from_args
from transom.encoder.config import EncoderConfig
from transom.gateway.config import GatewayConfig
from transom.llm.config import DecodeConfig, PrefillConfig


def _gateway(config: GatewayConfig) -> Any:
    from transom.gateway.server import GatewayStage

    return GatewayStage(config)


def _encoder(config: EncoderConfig) -> Any:
    from transom.encoder.server import EncoderStage

    return EncoderStage(config)


def _prefill(config: PrefillConfig) -> Any:
    from transom.llm.prefill import PrefillStage

    return PrefillStage(config)


def _decode(config: DecodeConfig) -> Any:
    from transom.llm.decode import DecodeStage

    return DecodeStage(config)


@dataclass(frozen=True, kw_only=True)
class StageCommand:
    """A stage as the command line sees it; `name` is also its section in TOML and environment."""

    name: str
    config: type[StageConfig]
    make: Callable[[Any], Any]
    summary: str
    examples: tuple[str, ...]


STAGES: dict[str, StageCommand] = {
    stage.name: stage
    for stage in (
        StageCommand(
            name="gateway",
            config=GatewayConfig,
            make=_gateway,
            summary="HTTP API: takes chat requests and spreads their parts over the other stages",
            examples=(
                "transom gateway --encoder tcp://127.0.0.1:7001 --prefill ipc:///run/p0 --decode ipc:///run/d0",
            ),
        ),
        StageCommand(
            name="encoder",
            config=EncoderConfig,
            make=_encoder,
            summary="turns pictures, video and sound into embeddings for the prefill workers",
            examples=(
                "transom encoder --bind tcp://127.0.0.1:7001",
                "transom encoder --bind tcp://0.0.0.0:7001 --advertise tcp://a:7001 --curve-key-file key",
            ),
        ),
        StageCommand(
            name="prefill",
            config=PrefillConfig,
            make=_prefill,
            summary="computes prompts and hands their KV to a decode worker",
            examples=("transom prefill --bind tcp://127.0.0.1:7101 --model mimo-nano",),
        ),
        StageCommand(
            name="decode",
            config=DecodeConfig,
            make=_decode,
            summary="generates tokens from the KV that prefill hands over",
            examples=("transom decode --bind tcp://127.0.0.1:7201 --device cuda",),
        ),
    )
}


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    for stage in STAGES.values():
        parser = commands.add_parser(
            stage.name,
            help=stage.summary,
            description=f"Run one {stage.name} process: {stage.summary}.",
            epilog=examples(*stage.examples),
        )
        add_flags(parser, stage.config)
        parser.set_defaults(run=_run, stage=stage.name)


def _run(args: argparse.Namespace) -> NoReturn:
    from transom.stage import run_stage

    stage = STAGES[args.stage]
    config = config_from_args(stage.config, stage.name, args)
    code = run_stage(lambda: stage.make(config), config, name=stage.name)
    # The stage has released everything; taking torch's modules apart would cost another second of CPU.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Shared memory whose last views end with the process is given back here.
    atexit._run_exitfuncs()
    os._exit(code)
