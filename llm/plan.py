"""Capacity planner: how many requests fit a GPU group, with one KV pool and with the engine's two.

Pure arithmetic for the command line; allocates nothing and knows no torch. `transom.llm.capacity` sizes the
real pools and is asked for every figure that a pool would hold, so that plan and engine cannot disagree.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transom.errors import ConfigError
from transom.hub import NANO_NAME, resolve_model
from transom.llm.capacity import PoolPlan, answer_margin, pages_for, plan_pools, swa_live_tokens, token_bytes
from transom.llm.config import LlmConfig
from transom.llm.footprint import WEIGHT_DTYPES, Weights, activation_bytes, weight_bytes
from transom.llm.model.registry import config_from_dict, read_config
from transom.llm.model.spec import DecoderConfig, LayerSpec

GB = 1_000_000_000
KV_DTYPES = {"bf16": 2, "fp8": 1, "fp32": 4}
_KNOWN_FOLDER = Path(__file__).parent / "model" / "known"
_MAX_EP = 128
_ENGINE = LlmConfig()


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for. `quantized`: its checkpoint holds fp8 weights."""

    name: str
    config: DecoderConfig
    quantized: bool


def known_models() -> tuple[str, ...]:
    """Return the names that need no checkpoint folder."""
    return (NANO_NAME, *sorted(path.stem for path in _KNOWN_FOLDER.glob("*.json")))


def find_model(name: str) -> PlannedModel:
    """Return a built-in model or the one in a checkpoint folder; never downloads. Raise ConfigError."""
    path = _KNOWN_FOLDER / f"{name}.json"
    if name not in known_models():
        path = Path(name).expanduser() / "config.json"
        if not path.parent.is_dir():
            listed = ", ".join(known_models())
            raise ConfigError(f"--model {name!r} is neither a checkpoint folder nor one of {listed}")
    elif name == NANO_NAME:
        path = resolve_model(name) / "config.json"
    if path.name == "config.json":
        read_config(path.parent)  # says in one line what is wrong with the file
    raw = json.loads(path.read_text(encoding="utf-8"))
    return PlannedModel(name, config_from_dict(raw), bool(raw.get("quantization_config")))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is asked. The defaults of pools and batching are the engine's own.

    `tp` GPUs share one attention: weights, KV heads and pools are split among them. `ep` GPUs share the
    experts; empty means the powers of two that divide the number of experts. None for `activation_bytes`
    means the estimate of the function of that name.
    """

    gpu_memory_bytes: int
    context_len: int
    memory_fraction: float = 0.9
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    page_size: int = _ENGINE.page_size
    release_interval: int = _ENGINE.swa_release_interval
    chunk: int = _ENGINE.max_batch_tokens
    running_requests: int = _ENGINE.max_running_requests
    activation_bytes: int | None = None
    concurrency: int = 1
    tp: int = 1
    ep: tuple[int, ...] = ()
    mtp: bool = False


@dataclass(frozen=True)
class RequestBytes:
    """KV of one request. `*_theory` counts tokens; `single` and `dual` whole pages, as pools hand them out.

    `dual_theory` is what the request needs between two steps; `dual` its most while it decodes, with what
    waits for the next release.
    """

    single_theory: int
    dual_theory: int
    single: int
    dual: int

    @property
    def ratio_theory(self) -> float:
        return self.single_theory / self.dual_theory

    @property
    def ratio(self) -> float:
        return self.single / self.dual


@dataclass(frozen=True)
class KVBytes:
    """KV bytes of the whole model (not of a TP rank): per token, and per request where they do not grow."""

    full_token: int
    swa_token: int
    window_len: int
    swa_fixed: int
    mtp_fixed: int

    @property
    def token(self) -> int:
        return self.full_token + self.swa_token


@dataclass(frozen=True)
class Fit:
    """What one kind of pool holds. Pages are those of one pool, the rest is the whole GPU group's."""

    full_pages: int
    swa_pages: int
    pool_bytes: int
    tokens: int
    requests: int


@dataclass(frozen=True)
class EPPlan:
    """One expert-parallel size. `kv_bytes`: what a GPU has left for KV, < 0 when the weights don't fit."""

    ep: int
    weights: Weights
    kv_bytes: int
    single: Fit
    dual: Fit


@dataclass(frozen=True)
class CapacityPlan:
    """The answer. `smallest_*`: the smallest EP size that holds the wanted concurrency; None if none does."""

    model: str
    options: PlanOptions
    kv: KVBytes
    request: RequestBytes
    activation_bytes: int
    sizes: tuple[EPPlan, ...]
    smallest_single: int | None
    smallest_dual: int | None


def plan_capacity(model: PlannedModel, options: PlanOptions) -> CapacityPlan:
    """Answer `options` for a model. Raise ConfigError for what cannot be asked.

    On each GPU: KV = gpu_memory * fraction - weights(ep) - activations. Attention is data-parallel over the
    group's ep / tp attention groups, each with a pool of its own; requests and tokens are summed over them.
    """
    config = model.config
    _check(options)
    if not _full(config) or not _swa(config):
        raise ConfigError(f"{model.name}: the engine serves hybrid models, with full and with SWA layers")
    if options.context_len > config.max_position_embeddings:
        raise ConfigError(
            f"--context: {options.context_len} is more than the {config.max_position_embeddings} tokens"
            f" that {model.name} allows"
        )
    if options.mtp and not config.mtp_layers:
        raise ConfigError(f"--mtp: the config of {model.name} counts no MTP modules")
    rank = _tp_rank(_with_mtp(config) if options.mtp else config, options.tp)
    reserve = options.activation_bytes
    if reserve is None:
        reserve = activation_bytes(
            config,
            options.weight_dtype,
            chunk=options.chunk,
            running_requests=options.running_requests,
            tp=options.tp,
        )
    sizes = tuple(
        _plan_size(config, rank, options, reserve, ep) for ep in options.ep or _ep_sizes(config, options.tp)
    )
    wanted = options.concurrency
    return CapacityPlan(
        model=model.name,
        options=options,
        kv=kv_bytes(config, options.kv_dtype),
        request=request_bytes(_with_mtp(config) if options.mtp else config, options),
        activation_bytes=reserve,
        sizes=sizes,
        smallest_single=min((size.ep for size in sizes if size.single.requests >= wanted), default=None),
        smallest_dual=min((size.ep for size in sizes if size.dual.requests >= wanted), default=None),
    )


def kv_bytes(config: DecoderConfig, kv_dtype: str) -> KVBytes:
    """Return per layer and token kv_heads * (head_dim + v_head_dim) * dtype, summed by kind of layer.

    The query itself is the last of a window's keys, so between two steps window - 1 tokens are kept.
    """
    dtype_bytes = KV_DTYPES[kv_dtype]
    swa_token = token_bytes(_swa(config), dtype_bytes)
    kept = _window(config) - 1
    mtp_kept = max((spec.window or 1 for spec in config.mtp_specs), default=1) - 1
    mtp_token = token_bytes(config.mtp_specs, dtype_bytes)
    full_token = token_bytes(_full(config), dtype_bytes)
    return KVBytes(full_token, swa_token, kept, kept * swa_token, mtp_kept * mtp_token)


def request_bytes(config: DecoderConfig, options: PlanOptions) -> RequestBytes:
    """Return what a request of `context_len` tokens takes with one pool and with two."""
    kv = kv_bytes(config, options.kv_dtype)
    length, page = options.context_len, options.page_size
    full, swa = _request_pages(config, options)
    return RequestBytes(
        single_theory=length * kv.token,
        dual_theory=length * kv.full_token + min(length, kv.window_len) * kv.swa_token,
        single=full * page * kv.token,
        dual=page * (full * kv.full_token + swa * kv.swa_token),
    )


def _plan_size(
    config: DecoderConfig, rank: DecoderConfig, options: PlanOptions, reserve: int, ep: int
) -> EPPlan:
    if ep % options.tp:
        raise ConfigError(f"--ep {ep}: must be a multiple of --tp {options.tp}")
    weights = weight_bytes(config, options.weight_dtype, ep=ep, tp=options.tp, mtp=options.mtp)
    left = int(options.gpu_memory_bytes * options.memory_fraction) - weights.total - reserve
    pools = ep // options.tp
    return EPPlan(
        ep, weights, left, single_fit(rank, options, left, pools), dual_fit(rank, options, left, pools)
    )


def single_pool_pages(config: DecoderConfig, options: PlanOptions, budget_bytes: int) -> int:
    """Return the pages, null page included, of one pool in which every layer keeps every token."""
    page_bytes = options.page_size * token_bytes(config.layers, KV_DTYPES[options.kv_dtype])
    return max(budget_bytes, 0) // page_bytes


def dual_pool_plan(config: DecoderConfig, options: PlanOptions, budget_bytes: int) -> PoolPlan:
    """Return what the engine would allocate. Raise ConfigError when it would refuse to start."""
    return plan_pools(
        config,
        budget_bytes=budget_bytes,
        dtype_bytes=KV_DTYPES[options.kv_dtype],
        page_size=options.page_size,
        typical_len=options.context_len,
        release_interval=options.release_interval,
        chunk=options.chunk,
        margin=answer_margin(options.page_size),
    )


def single_fit(config: DecoderConfig, options: PlanOptions, budget_bytes: int, pools: int) -> Fit:
    """Return what `pools` single pools of `budget_bytes` each hold."""
    pages = single_pool_pages(config, options, budget_bytes)
    if pages < 2:
        return Fit(0, 0, 0, 0, 0)
    page_bytes = options.page_size * token_bytes(config.layers, KV_DTYPES[options.kv_dtype])
    full, _ = _request_pages(config, options)
    tokens = (pages - 1) * options.page_size * pools
    return Fit(pages, 0, pages * page_bytes, tokens, (pages - 1) // full * pools)


def dual_fit(config: DecoderConfig, options: PlanOptions, budget_bytes: int, pools: int) -> Fit:
    """Return what `pools` dual pools of `budget_bytes` each hold: requests that decode at `context_len`."""
    try:
        plan = dual_pool_plan(config, options, budget_bytes)
    except ConfigError:
        return Fit(0, 0, 0, 0, 0)
    full, swa = _request_pages(config, options)
    # The chunk that is under way has pages of its own: requests that decode may not count on them.
    in_chunk = _live_pages(config, options, options.chunk) - _live_pages(config, options, 0)
    requests = min((plan.full_pages - 1) // full, (plan.swa_pages - 1 - in_chunk) // swa)
    return Fit(plan.full_pages, plan.swa_pages, plan.total_bytes, plan.full_tokens * pools, requests * pools)


def _request_pages(config: DecoderConfig, options: PlanOptions) -> tuple[int, int]:
    """Return the (full, SWA) pages of a request that decodes at `context_len`."""
    full = pages_for(options.context_len, options.page_size)
    return full, min(full, _live_pages(config, options, 0))


def _live_pages(config: DecoderConfig, options: PlanOptions, chunk: int) -> int:
    """Return the most SWA pages of a request, decoding (chunk 0) or in the middle of a chunk."""
    kept = _window(config) + answer_margin(options.page_size)
    return swa_live_tokens(kept, options.page_size, options.release_interval, chunk) // options.page_size


def _full(config: DecoderConfig) -> list[LayerSpec]:
    return [spec for spec in config.layers if spec.full]


def _swa(config: DecoderConfig) -> list[LayerSpec]:
    return [spec for spec in config.layers if not spec.full]


def _window(config: DecoderConfig) -> int:
    return max((spec.window or 1 for spec in _swa(config)), default=1)


def _with_mtp(config: DecoderConfig) -> DecoderConfig:
    """The modules are SWA layers as far as KV goes."""
    return dataclasses.replace(config, layers=config.layers + config.mtp_specs)


def _tp_rank(config: DecoderConfig, tp: int) -> DecoderConfig:
    """Give the layers the KV heads of one TP rank; a rank has at least one, which others may hold as well."""
    layers = tuple(dataclasses.replace(spec, kv_heads=-(-spec.kv_heads // tp)) for spec in config.layers)
    return dataclasses.replace(config, layers=layers)


def _ep_sizes(config: DecoderConfig, tp: int) -> Sequence[int]:
    experts = config.num_experts or 1
    powers = [2**i for i in range(_MAX_EP.bit_length()) if experts % 2**i == 0]
    return [ep for ep in powers if ep % tp == 0] or [tp]


def _check(options: PlanOptions) -> None:
    for flag, value, low in (
        ("--gpu-memory", options.gpu_memory_bytes, 1),
        ("--context", options.context_len, 1),
        ("--page-size", options.page_size, 1),
        ("--swa-release-interval", options.release_interval, 1),
        ("--max-batch-tokens", options.chunk, 1),
        ("--max-running-requests", options.running_requests, 1),
        ("--activation-gb", options.activation_bytes or 0, 0),
        ("--concurrency", options.concurrency, 1),
        ("--tp", options.tp, 1),
        *(("--ep", ep, 1) for ep in options.ep),
    ):
        if value < low:
            raise ConfigError(f"{flag}: {value} is less than {low}")
    if not 0 < options.memory_fraction <= 1:
        raise ConfigError(f"--memory-fraction: {options.memory_fraction} is not in 0..1")
    if options.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype: {options.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    if options.weight_dtype not in WEIGHT_DTYPES:
        raise ConfigError(
            f"--weight-dtype: {options.weight_dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}"
        )
