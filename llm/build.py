"""Makes an engine of its settings: kernels, model, pools, graphs, cache (llm processes at their start).

Knows no sockets. What each part is for is said where the part is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from transom.errors import ConfigError
from transom.hub import resolve_model
from transom.kernels.kv_rows import FP8, SCALE_BYTES
from transom.kernels.pick import KernelPick
from transom.llm.capacity import PoolPlan, answer_margin, plan_pools
from transom.llm.config import LlmConfig, PrefillConfig
from transom.llm.decode_graphs import DecodeGraphs, make_graphs, wants_graphs
from transom.llm.engine import Engine, EngineLimits
from transom.llm.free_memory import free_bytes
from transom.llm.kv_transfer import kv_name
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel, fused
from transom.llm.model.loader import load_language_model
from transom.llm.model.spec import DecoderConfig
from transom.llm.policies import make_order
from transom.llm.pools import DualPools
from transom.llm.prefix_cache import PrefixCache
from transom.llm.radix.retention import RetentionPolicy
from transom.llm.request import Event
from transom.llm.runner import make_current

logger = logging.getLogger(__name__)

GB = 1_000_000_000

Model = CausalLM | FusedModel


def pick_device(name: str) -> torch.device:
    """Return the device of `name`; "auto" is CUDA if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:  # torch's own words list all that it was ever built for
        raise ConfigError(f"device {name!r} is none: expected auto, cpu, cuda or cuda:N") from None


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16


def pick_kv_dtype(config: LlmConfig) -> torch.dtype:
    """Return the dtype of the KV pools; "auto" is that of the weights."""
    if config.kv_dtype == "fp8":
        return FP8
    name = config.dtype if config.kv_dtype == "auto" else config.kv_dtype
    return pick_dtype(name, pick_device(config.device))


def build_engine(config: LlmConfig, emit: Callable[[list[Event]], None]) -> tuple[Engine, Model]:
    """Load the model and allocate the pools. Blocks for as long as that takes."""
    device = pick_device(config.device)
    scratch = wants_graphs(config.cuda_graphs, device)
    model = _load(config, device)
    plan = _plan(config, model.config, device, scratch=scratch)
    pools = DualPools(
        model.config,
        plan,
        dtype=pick_kv_dtype(config),
        device=device,
        margin=_margin(config),
        clear_pages=not isinstance(model, FusedModel),
        scratch=scratch,
    )
    limits = EngineLimits(
        batch_tokens=config.max_batch_tokens,
        running_requests=config.max_running_requests,
        context_len=config.max_context_len or model.config.max_position_embeddings,
        swa_release_interval=config.swa_release_interval,
        overlap=config.overlap == "on" or (config.overlap == "auto" and device.type != "cpu"),
    )
    order = make_order(config.schedule_policy, lambda: engine.tokens_per_s / config.waiting_stretch)
    engine = Engine(
        model,
        pools,
        limits,
        emit,
        order=order,
        cache=_cache(config, model.config, pools),
        graphs=_graphs(config, model, pools, limits) if scratch else None,
    )
    return engine, model


def _load(config: LlmConfig, device: torch.device) -> Model:
    """Return the model on the fastest kernels there are for it."""
    threads = config.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    make_current(device)
    kernels = KernelPick(device, config.kernels)
    dtype = pick_dtype(config.dtype, device)
    # The MTP modules draft tokens; without speculative decoding nothing would run them.
    model = load_language_model(resolve_model(config.model), dtype=dtype, device=device, mtp=False)
    _check_fp8(model.config, pick_kv_dtype(config))
    ops = kernels.ops(wait_s=config.kernel_build_wait_s, threads=threads)
    fast = fused(model, ops) if ops is not None else None
    return fast or model


def _plan(config: LlmConfig, model: DecoderConfig, device: torch.device, *, scratch: bool) -> PoolPlan:
    """Split the memory for KV, and say how."""
    kv_dtype = pick_kv_dtype(config)
    budget = int(config.kv_memory_gb * GB)
    if config.kv_memory_share:
        budget = int(config.kv_memory_share * free_bytes(device))
    plan = plan_pools(
        model,
        budget_bytes=budget,
        dtype_bytes=kv_dtype.itemsize,
        page_size=config.page_size,
        typical_len=config.typical_context_len,
        release_interval=config.swa_release_interval,
        chunk=config.max_batch_tokens,
        margin=_margin(config),
        scratch=scratch,
    )
    logger.info(
        "%s on %s in %s, KV in %s: %s",
        config.model,
        device,
        str(pick_dtype(config.dtype, device)).removeprefix("torch."),
        kv_name(kv_dtype),
        plan.describe(),
    )
    return plan


def _cache(config: LlmConfig, model: DecoderConfig, pools: DualPools) -> PrefixCache | None:
    if not isinstance(config, PrefillConfig) or not config.prefix_cache:
        return None
    policy = RetentionPolicy(
        pools.window,
        pools.page_size,
        config.swa_keep_interval,
        config.swa_keep_until,
        int(config.swa_keep_share * pools.plan.swa_tokens),
    )
    return PrefixCache.where_it_fits(
        pools, config.model, model.eos_token_ids, policy=policy, answers=config.cache_answers
    )


def _graphs(config: LlmConfig, model: Model, pools: DualPools, limits: EngineLimits) -> DecodeGraphs | None:
    return make_graphs(
        model,
        pools,
        min(limits.context_len, pools.full_pages.capacity * pools.page_size),
        setting=config.cuda_graphs,
        most=min(config.cuda_graph_max_batch, config.max_running_requests, config.max_batch_tokens),
        most_bytes=config.cuda_graph_memory_mb * 1_000_000,
    )


def _margin(config: LlmConfig) -> int:
    """Return the SWA slots behind the window. On decode prefill workers say whether they want answers."""
    keeps = config.prefix_cache and config.cache_answers if isinstance(config, PrefillConfig) else True
    return answer_margin(config.page_size) if keeps else 0


def _check_fp8(config: DecoderConfig, kv_dtype: torch.dtype) -> None:
    """Refuse fp8 for heads that would leave the scale of a row unaligned."""
    sizes = {dim for spec in config.layers for dim in (spec.head_dim, spec.v_head_dim) if dim % SCALE_BYTES}
    if kv_dtype == FP8 and sizes:
        raise ConfigError(
            f"kv_dtype fp8: head sizes must be multiples of {SCALE_BYTES}, the model has {sorted(sizes)}"
        )
