"""Small random models and the backends that tests run them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from transom.llm.model.config import MiMoV2Config
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.model.spec import LayerSpec


class CachedAttention:
    """One request with a cache that keeps everything; every query is answered by itself."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        spec: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer in self.cache:
            k, v = torch.cat([self.cache[layer][0], k]), torch.cat([self.cache[layer][1], v])
        self.cache[layer] = k, v
        group = spec.heads // spec.kv_heads
        past = k.shape[0] - q.shape[0]
        rows = []
        for i in range(q.shape[0]):
            end = past + i + 1
            start = 0 if spec.window is None else max(0, end - spec.window)
            keys = k[start:end].repeat_interleave(group, dim=1)
            values = v[start:end].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,khd->hk", q[i], keys) / spec.head_dim**0.5
            top = scores.max(-1).values if sink is None else torch.maximum(scores.max(-1).values, sink)
            exps = (scores - top[:, None]).exp()
            total = exps.sum(-1) if sink is None else exps.sum(-1) + (sink - top).exp()
            rows.append(torch.einsum("hk,khv->hv", exps / total[:, None], values))
        return torch.stack(rows)


@pytest.fixture(scope="session")
def cached_attention() -> type[CachedAttention]:
    return CachedAttention


def hub_config(**changes: Any) -> dict[str, Any]:
    """A small config in the hub's spelling."""
    config: dict[str, Any] = {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "v_head_dim": 16,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.334,
        "rope_theta": 10000000,
        "swa_rope_theta": 10000,
        "sliding_window": 6,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 0.707,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 3,
        "eos_token_id": 5,
        "pad_token_id": 3,
    }
    return {**config, **changes}


@pytest.fixture(scope="session", name="hub_config")
def hub_config_fixture() -> Callable[..., dict[str, Any]]:
    return hub_config


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every tensor values that matter: sinks and correction biases included, norms away from one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "sink" in name:
                tensor.copy_(noise * 2)
            elif "correction_bias" in name:
                tensor.copy_(noise * 0.5)
            elif "norm" in name:
                tensor.copy_(1 + noise * 0.3)
            elif "inv_freq" not in name and "embed_scale" not in name:
                tensor.copy_(noise * 0.15)


@pytest.fixture(scope="session", name="randomise")
def randomise_fixture() -> Callable[..., None]:
    return randomise


@pytest.fixture(scope="session")
def random_model() -> Callable[..., MiMoV2ForCausalLM]:
    """Build a random model from changes to `hub_config`."""

    def build(**changes: Any) -> MiMoV2ForCausalLM:
        model = MiMoV2ForCausalLM(MiMoV2Config.from_dict(hub_config(**changes))).eval()
        randomise(model)
        return model

    return build
