"""Write the checkpoint folder in the real V2.5 layout: config, tokenizer, template and all tensors.

Used by training only. Serving reads the folder and never imports this.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.export import save_audio, save_audio_tokenizer, save_vision
from transom.encoder.models.vision import VisionTower
from transom.kernels.weights import save_tensors
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.export import save_language_model
from transom.llm.model.mimo_v2 import DecoderLayer, MiMoV2ForCausalLM, MoE
from transom.nano import config
from transom.nano.data.dialogues import corpus
from transom.nano.tokenizer import save_tokenizer, train_tokenizer

# How loud the layers of an untrained model speak, as a share of the usual.
QUIET = 0.02
CHECKPOINT = Path(__file__).parent / "checkpoint"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
CORPUS_SEED, CORPUS_SIZE = 11, 8000


@dataclass(frozen=True)
class Models:
    """The three models of a checkpoint."""

    language: MiMoV2ForCausalLM
    vision: VisionTower
    audio: AudioEncoder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_assets(folder: Path) -> None:
    """Train the tokenizer and write everything but the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(corpus(CORPUS_SEED, CORPUS_SIZE)), folder, config.MAX_POSITIONS)
    write_configs(folder)


def write_configs(folder: Path) -> None:
    """Write the template and the configs that fit the tokenizer in `folder`."""
    full = config.full_config(Tokenizer.from_file(str(folder / "tokenizer.json")))
    _write_json(folder / "config.json", full)
    _write_json(folder / "audio_tokenizer" / "config.json", config.audio_tokenizer_config())
    generation = {
        "eos_token_id": full["eos_token_id"],
        "pad_token_id": full["pad_token_id"],
        "do_sample": False,
    }
    _write_json(folder / "generation_config.json", generation)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def new_language_model(folder: Path) -> MiMoV2ForCausalLM:
    """Build an untrained language model that finds copying easily.

    Its head starts along the embedding, and its layers start quiet, so that what a layer reads is the
    embedding and what little the layers before it have to say.
    """
    model = MiMoV2ForCausalLM(MiMoV2Config.from_folder(folder))
    nn.init.normal_(model.embed_tokens.weight, std=0.5)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.embed_tokens.weight * 0.2)
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            quiet = layer.mlp.down if isinstance(layer.mlp, MoE) else layer.mlp.down_proj.weight
            quiet *= QUIET
            layer.self_attn.o_proj.weight *= QUIET
    return model


def write_tensors(models: Models, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write all tensors of a checkpoint beside its configs."""
    extra = {**save_vision(models.vision, dtype), **save_audio(models.audio, dtype)}
    save_language_model(models.language, folder, dtype=dtype, fused_qkv=True, extra=extra)
    tokenizer = save_audio_tokenizer(models.audio, dtype)
    save_tensors(folder / "audio_tokenizer" / "model.safetensors", tokenizer)
