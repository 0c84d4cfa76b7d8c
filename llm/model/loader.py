"""Load a MiMo-V2 language model from a checkpoint folder (llm processes, trainer).

Leaves the vision and audio tensors of a multimodal checkpoint to the encoder.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from transom.kernels.weights import Progress, TensorFiles, fill_slots
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM, Router
from transom.llm.model.tensors import MTP_PREFIX, OTHER_PREFIXES, language_model_slots


def load_language_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    mtp: bool = True,
    progress: Progress | None = None,
) -> MiMoV2ForCausalLM:
    """Return the model in `folder`, in eval mode; routers stay fp32 whatever `dtype` is.

    With `mtp` off its MTP modules are left out. `progress` gets (bytes done, bytes in all). Raise ConfigError
    for an unusable config.json and CheckpointError for unusable files or tensors, all of them listed.
    """
    config = MiMoV2Config.from_folder(folder)
    with TensorFiles.in_folder(folder) as files:
        names = files.infos.keys()
        if not mtp:
            config = dataclasses.replace(config, mtp_layers=0)
        elif config.mtp_layers == 0:
            modules = {name.split(".")[3] for name in names if name.startswith(f"{MTP_PREFIX}layers.")}
            config = dataclasses.replace(config, mtp_layers=len(modules))
        ignored = OTHER_PREFIXES if mtp else (*OTHER_PREFIXES, MTP_PREFIX)
        if config.tie_word_embeddings:
            ignored = (*ignored, "lm_head.")
        model = empty_model(config, dtype, device)
        fill_slots(
            files,
            language_model_slots(model, names.__contains__),
            ignore=lambda name: name.startswith(ignored),
            block=config.weight_block,
            progress=progress,
        )
    return model


def empty_model(config: MiMoV2Config, dtype: torch.dtype, device: torch.device | str) -> MiMoV2ForCausalLM:
    """Allocate a model in eval mode whose parameters hold nothing yet."""
    with torch.device("meta"):
        model = MiMoV2ForCausalLM(config).to(dtype)
    for module in model.modules():
        if isinstance(module, Router):
            module.float()
    model = model.to_empty(device=device).eval()
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model
