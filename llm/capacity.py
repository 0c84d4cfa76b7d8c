"""How much KV a memory budget holds: bytes per token and the split into full and SWA pool.

Pure arithmetic over a model config (llm processes, planner); knows no torch and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transom.errors import ConfigError
from transom.llm.model.spec import DecoderConfig, LayerSpec

_SCALE_BYTES = 4


def row_bytes(dim: int, dtype_bytes: int) -> int:
    """Return the bytes of K or V of one token and head; values of one byte (fp8) have a scale behind them."""
    return dim * dtype_bytes + (_SCALE_BYTES if dtype_bytes == 1 else 0)


def token_bytes(specs: Sequence[LayerSpec], dtype_bytes: int) -> int:
    """Return the bytes of one token's K and V over the given layers."""
    return sum(
        spec.kv_heads * (row_bytes(spec.head_dim, dtype_bytes) + row_bytes(spec.v_head_dim, dtype_bytes))
        for spec in specs
    )


def answer_margin(page_size: int) -> int:
    """Return the SWA slots that stay behind the window where answers go back to the prefix cache.

    An answer seldom ends where a page does, and the window before its last full page is what is cached.
    """
    return 2 * page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Return how many pages `tokens` slots take."""
    return -(-tokens // page_size)


@dataclass(frozen=True)
class PoolPlan:
    """Pages of each pool, the null page that each pool keeps included, and what they cost."""

    page_size: int
    full_pages: int
    swa_pages: int
    full_token_bytes: int
    swa_token_bytes: int

    @property
    def full_tokens(self) -> int:
        return (self.full_pages - 1) * self.page_size

    @property
    def swa_tokens(self) -> int:
        return (self.swa_pages - 1) * self.page_size

    @property
    def full_bytes(self) -> int:
        return self.page_size * self.full_pages * self.full_token_bytes

    @property
    def swa_bytes(self) -> int:
        return self.page_size * self.swa_pages * self.swa_token_bytes

    @property
    def total_bytes(self) -> int:
        return self.full_bytes + self.swa_bytes

    def describe(self) -> str:
        return (
            f"full pool {self.full_tokens} tokens in {self.full_bytes / 1e6:.1f} MB"
            f" ({self.full_token_bytes} B each), SWA pool {self.swa_tokens} tokens in"
            f" {self.swa_bytes / 1e6:.1f} MB ({self.swa_token_bytes} B each)"
        )


def swa_live_tokens(window: int, page_size: int, release_interval: int, chunk: int) -> int:
    """Return the most SWA slots one running request holds: O(window + chunk), whatever its length.

    Pages behind the window leave at every multiple of `release_interval` while it decodes, and after every
    chunk, which may begin anywhere in a page; 0 for `chunk` leaves prefill out.
    """
    decoding = _most_live_pages(window, page_size, release_interval, math.gcd(release_interval, page_size))
    return max(decoding, _most_live_pages(window, page_size, chunk, 1)) * page_size


def _most_live_pages(window: int, page_size: int, step: int, alignment: int) -> int:
    """Return the most pages under window and step when steps begin at the multiples of `alignment`."""
    return max(
        pages_for(begin + step, page_size) - (begin - window + 1) // page_size
        for begin in range(0, page_size, alignment)
    )


def plan_pools(
    config: DecoderConfig,
    *,
    budget_bytes: int,
    dtype_bytes: int,
    page_size: int,
    typical_len: int,
    release_interval: int,
    chunk: int,
    margin: int = 0,
    scratch: bool = False,
) -> PoolPlan:
    """Split one budget so that requests of `typical_len` tokens fill both pools at the same time.

    A request of T tokens holds T full slots but SWA slots of its window only, so the SWA pool gets that share
    of the slots, and beside them those of one chunk under way. `margin` tokens stay behind the window.
    With `scratch` the budget leaves room for a page of each pool beside the plan.
    Neither pool shrinks when the budget grows.
    Raise ConfigError when it is too small, or when the model lacks either kind of layer.
    """
    full = [spec for spec in config.layers if spec.full]
    swa = [spec for spec in config.layers if not spec.full]
    if not full or not swa:
        raise ConfigError("the engine serves hybrid models: at least one full and one SWA layer")
    window = max(spec.window or 0 for spec in swa) + margin
    full_bytes = token_bytes(full, dtype_bytes) * page_size
    swa_bytes = token_bytes(swa, dtype_bytes) * page_size
    budget_bytes -= scratch * (full_bytes + swa_bytes)
    steady = pages_for(swa_live_tokens(window, page_size, release_interval, 0), page_size)
    in_chunk = pages_for(swa_live_tokens(window, page_size, release_interval, chunk), page_size)
    typical_full = pages_for(typical_len, page_size)
    typical_swa = min(steady, typical_full)
    request_bytes = typical_full * full_bytes + typical_swa * swa_bytes
    # Beside the requests: the null page of each pool, and what one chunk needs beyond a decoding request.
    fixed_swa, least_swa = 1 + in_chunk - steady, 1 + in_chunk
    usable = max(budget_bytes - full_bytes - fixed_swa * swa_bytes, 0)
    swa_pages = max(fixed_swa + usable * typical_swa // request_bytes, least_swa)
    full_pages = min(
        1 + usable * typical_full // request_bytes, (budget_bytes - swa_pages * swa_bytes) // full_bytes
    )
    if full_pages < least_swa:
        needed = least_swa * (full_bytes + swa_bytes)
        raise ConfigError(
            f"kv_memory_gb or kv_memory_share: {budget_bytes} bytes hold no request with a chunk of {chunk}"
            f" tokens and a window of {window}; at least {needed} bytes are needed"
        )
    return PoolPlan(page_size, full_pages, swa_pages, full_bytes // page_size, swa_bytes // page_size)
