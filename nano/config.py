"""The nano model's hyper-parameters, spelled as a real V2.5 checkpoint spells them.

Used by training only: serving reads the files that this module's dictionaries become.
The sizes are chosen for CPU training in a few hours, and so that windows (32) matter in
short prompts while a picture costs 9 to 16 language-model tokens.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

HIDDEN = 128
VOCAB_ROWS = 1536
RVQ_SIZES = (128, 64, 64, 64)
MAX_POSITIONS = 16_384
HYBRID_PATTERN = (0, 1, 1, 0, 1, 1, 0, 1)


def language_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the top-level part of `config.json`, without the vision, audio and processor parts."""

    def token_id(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    return {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_ROWS,
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_hidden_layers": len(HYBRID_PATTERN),
        "hybrid_layer_pattern": list(HYBRID_PATTERN),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "head_dim": 48,
        "v_head_dim": 32,
        "swa_head_dim": 48,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.334,
        "rope_theta": 10_000,
        "swa_rope_theta": 100,
        "sliding_window": 32,
        "sliding_window_size": 32,
        "window_keys": 33,
        "attention_value_scale": 0.707,
        "attention_bias": False,
        "attention_projection_layout": "fused_qkv",
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "moe_layer_freq": [0] + [1] * (len(HYBRID_PATTERN) - 1),
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": None,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 3,
        "mtp_intermediate_size": 256,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "audio_token_id": token_id("<|audio_pad|>"),
        "video_start_token_id": token_id("<|mimo_video_start|>"),
        "video_end_token_id": token_id("<|mimo_video_end|>"),
        "audio_start_token_id": token_id("<|mimo_audio_start|>"),
        "audio_end_token_id": token_id("<|mimo_audio_end|>"),
    }


def vision_config() -> dict[str, Any]:
    """Return `vision_config`: full blocks at both ends, row and column blocks between them."""
    return {
        "model_type": "mimovl",
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 192,
        "out_hidden_size": HIDDEN,
        "projection_hidden_size": 256,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "qk_channels": 24,
        "kv_channels": 24,
        "in_chans": 3,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "silu",
        "use_sink": True,
        "fullatt_block_indexes": [0, 3],
        "vit_window_attn_types": [-1, 0, 1, -1],
        "visual_token_window_size": 16,
        "window_size": 128,
    }


def audio_config() -> dict[str, Any]:
    """Return `audio_config`: the group encoder that turns four RVQ frames into one token."""
    return {
        "audio_channels": len(RVQ_SIZES),
        "audio_segment_size": 6000,
        "group_size": 4,
        "input_local_dim": 128,
        "input_local_layers": 2,
        "input_local_attn_heads": 4,
        "input_local_head_dim": 32,
        "input_local_intermediate_size": 256,
        "input_full_attention": True,
        "add_post_norm": True,
        "partial_rotary_factor": 1.0,
        "projection_layers": 2,
        "projection_hidden_size": 256,
        "rope_theta": 640_000,
        "out_hidden_size": HIDDEN,
        "speech_vocab_size": 128,
        "speech_zeroemb_idx": 127,
    }


def audio_tokenizer_config() -> dict[str, Any]:
    """Return `audio_tokenizer/config.json`: the mel front end, the encoder and the quantiser."""
    return {
        "model_type": "mimo_audio_tokenizer",
        "sampling_rate": 24_000,
        "nfft": 960,
        "window_size": 960,
        "hop_length": 240,
        "n_mels": 128,
        "fmin": 0,
        "fmax": None,
        "kernel_size": 3,
        "stride_size": 2,
        "avg_pooler": 2,
        "d_model": 128,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 384,
        "encoder_skip_layer_id": 2,
        "encoder_causal": True,
        "encoder_attn_window_size": [128, 0],
        "hybrid_attention": True,
        "swa_per_block": 2,
        "rope_theta": 10_000,
        "activation_function": "gelu",
        "ln_type": "LayerNorm",
        "num_quantizers": len(RVQ_SIZES),
        "codebook_size": list(RVQ_SIZES),
    }


def processor_config(language: dict[str, Any]) -> dict[str, Any]:
    """Return `processor_config`: pixel limits, video sampling, audio front end, special ids."""
    special = {
        key: value for key, value in language.items() if key.endswith("_token_id") and value is not None
    }
    return {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_min_pixels": 8192,
        "image_max_pixels": 16384,
        "min_pixels": 8192,
        "max_pixels": 16384,
        "video_min_pixels": 6144,
        "video_max_pixels": 12288,
        "video_total_max_pixels": 12288 * 512,
        "fps": 1.0,
        "num_frames": None,
        "max_frames": 128,
        "min_frames": 8,
        "use_video_timestamps": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "audio_sampling_rate": 24_000,
        "audio_nfft": 960,
        "audio_window_size": 960,
        "audio_hop_length": 240,
        "audio_n_mels": 128,
        "audio_fmin": 0,
        "audio_fmax": None,
        "audio_segment_size": 6000,
        "audio_channels": len(RVQ_SIZES),
        "audio_group_size": 4,
        "audio_input_id_per_second": 25,
        **special,
    }


def full_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the whole `config.json` of the checkpoint."""
    language = language_config(tokenizer)
    return {
        **language,
        "vision_config": vision_config(),
        "audio_config": audio_config(),
        "processor_config": processor_config(language),
    }
