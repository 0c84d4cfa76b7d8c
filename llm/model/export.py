"""Write a language model as a checkpoint under the hub's tensor names (trainer)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from transom.kernels.weights import Slot, save_tensors
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.model.tensors import MTP_PREFIX, language_model_slots


def save_language_model(
    model: MiMoV2ForCausalLM,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    fused_qkv: bool = True,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write model.safetensors and, if there are MTP modules, model_mtp.safetensors; no config.json.

    `dtype` converts everything but the routers, which stay fp32. `fused_qkv` interleaves q, k and v by
    `qkv_shards` as V2.5 does. `extra` tensors (vision, audio) join model.safetensors as they are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, slot in language_model_slots(model, lambda _: fused_qkv).items():
        value = _in_checkpoint_order(slot)
        tensors[name] = value if ".mlp.gate." in name or dtype is None else value.to(dtype)
    tensors |= extra or {}
    mtp = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MTP_PREFIX)}
    save_tensors(folder / "model.safetensors", tensors)
    if mtp:
        save_tensors(folder / "model_mtp.safetensors", mtp)


def _in_checkpoint_order(slot: Slot) -> torch.Tensor:
    value = slot.target.detach()
    if slot.row_order is None:
        return value
    shuffled = torch.empty_like(value)
    shuffled[slot.row_order.to(value.device)] = value
    return shuffled
