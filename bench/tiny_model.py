"""Random hybrid checkpoints of a size that one core serves: the same weights for every engine compared.

`python -m transom.bench.tiny_model FOLDER` writes config, tensors, tokenizer and chat template. The model
says nothing; its shapes are what is timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from transom.hub import NANO_NAME, resolve_model
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.export import save_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM

VOCAB = 8192
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def hybrid_config(*, moe: bool = True, layers: int = 7) -> dict[str, Any]:
    """Seven layers of 512, the first and the last full, a window of 128, 16 experts of which 2 run.

    22 million weights take part in a token; `moe` off makes all feed-forward parts dense. k and v heads are
    of one size because that is what other engines' CPU kernels take.
    """
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "moe_intermediate_size": 256,
        "num_hidden_layers": layers,
        "hybrid_layer_pattern": [0, *[1] * (layers - 2), 0],
        "moe_layer_freq": [0, *[int(moe)] * (layers - 1)],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 64,
        "swa_v_head_dim": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5_000_000.0,
        "swa_rope_theta": 10_000.0,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_value_scale": 0.707,
        "attention_bias": False,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
        "eos_token_id": CONTROL_TOKENS.index("<|im_end|>"),
        "pad_token_id": CONTROL_TOKENS.index("<|endoftext|>"),
    }


def random_model(config: MiMoV2Config, seed: int = 0) -> MiMoV2ForCausalLM:
    """Return a model whose activations stay near one, with sinks and correction biases that matter."""
    torch.manual_seed(seed)
    model = MiMoV2ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.normal_()
        elif parameter.dim() > 1 and "experts" not in name:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(std=0.1)
    return model


def write_checkpoint(folder: Path, *, moe: bool = True) -> None:
    """Write a whole checkpoint to `folder`, about 110 MB with experts."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hybrid_config(moe=moe)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model = random_model(MiMoV2Config.from_dict(config))
    save_language_model(model, folder, dtype=torch.bfloat16, fused_qkv=False)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the standard library's sources: text that every machine has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train([str(path) for path in sources[:150]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 16384}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(resolve_model(NANO_NAME) / "chat_template.jinja", folder / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random hybrid checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dense", action="store_true", help="no experts")
    args = parser.parse_args()
    write_checkpoint(args.folder, moe=not args.dense)


if __name__ == "__main__":
    main()
