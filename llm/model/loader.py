"""Load a language model of any served architecture from a checkpoint folder (llm processes, trainer).

Leaves the vision and audio tensors of a multimodal checkpoint to the encoder.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from transom.kernels.weights import Progress, TensorFiles, fill_slots
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.registry import new_model, read_config
from transom.llm.model.spec import DecoderConfig
from transom.llm.model.tensors import MTP_PREFIX


def load_language_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    mtp: bool = True,
    progress: Progress | None = None,
) -> CausalLM:
    """Return the model in `folder`, in eval mode; routers stay fp32 whatever `dtype` is.

    With `mtp` off its MTP modules are left out. `progress` gets (bytes done, bytes in all). Raise ConfigError
    for an unusable config.json and CheckpointError for unusable files or tensors, all of them listed.
    """
    config = read_config(folder)
    with TensorFiles.in_folder(folder) as files:
        names = files.infos.keys()
        if not mtp:
            config = dataclasses.replace(config, mtp_layers=0)
        elif config.mtp_layers == 0 and config.mtp_spec is not None:
            modules = {name.split(".")[3] for name in names if name.startswith(f"{MTP_PREFIX}layers.")}
            config = dataclasses.replace(config, mtp_layers=len(modules))
        model = empty_model(config, dtype, device)
        ignored = model.ignored_prefixes if mtp else (*model.ignored_prefixes, MTP_PREFIX)
        if config.tie_word_embeddings:
            ignored = (*ignored, "lm_head.")
        fill_slots(
            files,
            model.slots(names.__contains__),
            ignore=lambda name: name.startswith(ignored),
            block=config.weight_block,
            progress=progress,
        )
    return model


def empty_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Allocate a model in eval mode whose parameters hold nothing yet."""
    with torch.device("meta"):
        model = new_model(config).to(dtype)
    for module in model.keep_fp32():
        module.float()
    model = model.to_empty(device=device).eval()
    model.tie()
    return model
