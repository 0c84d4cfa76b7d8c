"""Settings of the prefill and decode processes. Free of torch: the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass

from transom.config import StageConfig, setting
from transom.llm.policies import POLICIES


@dataclass(frozen=True, kw_only=True)
class LlmConfig(StageConfig):
    """What prefill and decode have in common: pools, batching and queue bounds."""

    # One process per core beats one process over all cores for the small matrices of a CPU deployment.
    threads: int = setting(1, "CPU threads for tensor work in this process; 0: all cores", ge=0, le=1024)
    dtype: str = setting(
        "auto",
        "dtype of weights and activations; auto is float32 on a CPU, else bfloat16",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = setting(
        "auto",
        "dtype of the KV pools; auto is that of the weights, fp8 a quarter of float32's memory for less exact"
        " attention. The same for prefill and decode workers",
        choices=("auto", "float32", "bfloat16", "fp8"),
    )
    kernels: str = setting(
        "auto",
        "auto: the fastest that this machine can run, compiled at the first start on a CPU;"
        " torch: the reference only",
        choices=("auto", "torch"),
    )
    kernel_build_wait_s: float = setting(
        30.0,
        "how long a start waits for kernels to be compiled before it goes on with torch's",
        ge=0,
        le=3600,
    )
    cuda_graphs: str = setting(
        "auto",
        "record decode steps as CUDA graphs and replay them; auto: where the device and the kernels can;"
        " padded: the same buffers and padding without recording, to check them, also on a CPU",
        choices=("auto", "on", "off", "padded"),
    )
    cuda_graph_max_batch: int = setting(
        64, "largest batch that is recorded; larger ones run call by call", ge=1, le=4096
    )
    cuda_graph_memory_mb: int = setting(
        1024, "memory of all recorded steps; sizes that would pass it are not recorded", ge=1
    )
    kv_memory_gb: float = setting(0.25, "memory of both KV pools together", ge=0.0005, le=4096)
    kv_memory_share: float = setting(
        0.0,
        "share of the memory that is free once the model is loaded, for both KV pools; 0: kv_memory_gb",
        ge=0.0,
        le=1.0,
    )
    page_size: int = setting(16, "tokens in a page of the KV pools", ge=1, le=1024)
    typical_context_len: int = setting(
        512, "context length of a usual request: sets the SWA pool's share of the memory", ge=1
    )
    max_context_len: int = setting(0, "longest prompt plus output; 0: what the model allows", ge=0)
    max_batch_tokens: int = setting(
        576, "tokens computed in one step; chunks of long prompts take eight ninths of them at most", ge=1
    )
    max_running_requests: int = setting(64, "requests computed in one step", ge=1, le=65536)
    overlap: str = setting(
        "auto",
        "plan the next step while one is computed; auto: on a device of its own, not on the CPU that plans",
        choices=("auto", "on", "off"),
    )
    schedule_policy: str = setting(
        "fewest-uncached",
        "who is computed next within a priority: fewest tokens left to compute with a credit for waiting,"
        " first come first served, longest cached prefix, earliest deadline",
        choices=POLICIES,
    )
    waiting_stretch: float = setting(
        50.0,
        "fewest-uncached: later prompts pass one for at most this many times as long as computing it takes",
        ge=1.0,
        le=1e6,
    )
    max_waiting_tokens: int = setting(
        131072, "prompt tokens that may wait here; more are refused with 429", ge=1
    )
    swa_release_interval: int = setting(
        16, "decoded tokens after which slots that left the window are freed", ge=1
    )
    host_reserve_gb: float = setting(
        1.0, "host memory for KV between prefill and decode: handed over, not yet decoding", ge=0.001, le=4096
    )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(LlmConfig):
    """Settings of `transom prefill`."""

    prefix_cache: bool = setting(True, "keep the KV of prompts, and reuse it where a later one begins alike")
    cache_answers: bool = setting(
        True, "have decode workers send the KV of answers back, so that a next turn does not compute it anew"
    )

    max_parked_mb: int = setting(
        512, "embeddings held for prompts that are not computed yet; more are refused", ge=1
    )
    swa_keep_interval: int = setting(
        512,
        "tokens between extra SWA windows kept of a prompt, where a cut or branching one hits; 0: none",
        ge=0,
    )
    swa_keep_until: int = setting(65536, "position up to which swa_keep_interval applies", ge=0)
    swa_keep_share: float = setting(
        0.25, "share of the SWA pool that the extra windows of one prompt may take; 0: none", ge=0.0, le=1.0
    )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(LlmConfig):
    """Settings of `transom decode`."""
