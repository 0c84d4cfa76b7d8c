"""The pools against a dictionary: what was stored is what is read, and no page is ever lost or shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from transom.llm.capacity import PoolPlan
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.pools import NULL_PAGE, DualPools, HostKV, PageAllocator, PoolExhaustedError, RequestKV

PAGE_SIZE = 3
FULL, SWA = 14, 8


def model_config() -> MiMoV2Config:
    return MiMoV2Config.from_dict(
        {
            "model_type": "mimo_v2", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 0, 0],
            "num_attention_heads": 2, "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "head_dim": 4,
            "v_head_dim": 2, "partial_rotary_factor": 0.5, "rope_theta": 100, "sliding_window": 6,
        }
    )  # fmt: skip


class PoolMachine(RuleBasedStateMachine):
    """Each token's rows hold a number of its own; the dictionary `live` knows them by request."""

    kvs = Bundle("kvs")
    hosts = Bundle("hosts")

    def __init__(self) -> None:
        super().__init__()
        plan = PoolPlan(PAGE_SIZE, FULL + 1, SWA + 1, 0, 0)
        self.pools = DualPools(model_config(), plan, dtype=torch.float32, device=torch.device("cpu"))
        self.live: dict[RequestKV, list[float]] = {}
        self.counter = 0.0

    def rows(self, store: str, numbers: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (layers, tokens, kv_heads, dim) which differ by layer and head as well."""
        pool = getattr(self.pools, store)
        layers, heads, _, _, dim = pool.k.shape
        base = torch.tensor(numbers)[None, :, None, None] + torch.arange(layers)[:, None, None, None] / 8
        k = (base + torch.arange(heads)[None, None, :, None] / 16).expand(-1, -1, -1, dim)
        return k, -k[..., : pool.v.shape[-1]]

    def live_from(self, numbers: list[float]) -> int:
        return max(len(numbers) - self.pools.window + 1, 0)

    @rule(target=kvs)
    def start(self) -> RequestKV:
        kv = RequestKV()
        self.live[kv] = []
        return kv

    @rule(kv=kvs, count=st.integers(1, 11))
    def grow(self, kv: RequestKV, count: int) -> None:
        if kv not in self.live:
            return
        free = self.pools.full_pages.available, self.pools.swa_pages.available
        wanted = -(-(kv.length + count) // PAGE_SIZE) - kv.count
        try:
            self.pools.extend(kv, kv.length + count)
        except PoolExhaustedError:
            assert wanted > min(free)
            assert free == (self.pools.full_pages.available, self.pools.swa_pages.available)
            return
        assert wanted <= min(free)
        numbers = [self.counter + i for i in range(1, count + 1)]
        self.counter += count
        full, swa = self.pools.slots(kv, kv.length, kv.length + count)
        assert NULL_PAGE not in swa // PAGE_SIZE
        self.pools.full.write(torch.from_numpy(full), *self.rows("full", numbers))
        self.pools.swa.write(torch.from_numpy(swa), *self.rows("swa", numbers))
        self.live[kv] += numbers
        kv.length += count

    @rule(kv=kvs)
    def slide(self, kv: RequestKV) -> None:
        if kv in self.live:
            self.pools.slide(kv)
            window_pages = -(-self.pools.window // PAGE_SIZE) + 1
            assert kv.swa_count <= window_pages

    @rule(target=hosts, kv=kvs)
    def offload(self, kv: RequestKV) -> tuple[HostKV, list[float]] | None:
        if not self.live.get(kv):
            return None
        numbers = self.live.pop(kv)
        host = self.pools.offload(kv)
        self.check_host(host, numbers)
        self.pools.release(kv)
        return host, numbers

    def check_host(self, host: HostKV, numbers: list[float]) -> None:
        assert host.length == len(numbers)
        assert host.swa_len == min(len(numbers), self.pools.window - 1)
        for store, tail in (("full", numbers), ("swa", numbers[len(numbers) - host.swa_len :])):
            k, v = self.rows(store, tail)
            assert torch.equal(getattr(host, f"{store}_k"), k)
            assert torch.equal(getattr(host, f"{store}_v"), v)

    @rule(target=kvs, pair=consumes(hosts))
    def adopt(self, pair: tuple[HostKV, list[float]] | None) -> RequestKV:
        if pair is None:
            return RequestKV()
        host, numbers = pair
        free = self.pools.full_pages.available, self.pools.swa_pages.available
        full = -(-len(numbers) // PAGE_SIZE)
        swa = full - self.live_from(numbers) // PAGE_SIZE
        try:
            kv = self.pools.adopt(host)
        except PoolExhaustedError:
            assert full > free[0] or swa > free[1]
            assert free == (self.pools.full_pages.available, self.pools.swa_pages.available)
            return RequestKV()
        self.live[kv] = list(numbers)
        return kv

    @rule(kv=consumes(kvs))
    def release(self, kv: RequestKV) -> None:
        if self.live.pop(kv, None) is not None:
            self.pools.release(kv)
            assert kv.count == kv.length == 0

    @invariant()
    def pages_add_up(self) -> None:
        self.pools.check_integrity(self.live)

    @precondition(lambda self: any(self.live.values()))
    @invariant()
    def rows_are_where_they_belong(self) -> None:
        for kv, numbers in self.live.items():
            if numbers:
                self.check_host(self.pools.offload(kv), numbers)


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestPools = PoolMachine.TestCase


def test_freeing_twice_is_caught() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pools, kv: kv.append([kv.pages[0]]), "two owners"),
        (lambda pools, kv: setattr(kv, "count", kv.count - 1), "beyond the last page"),
        (lambda pools, kv: setattr(kv, "swa_from", 2), "window is gone"),
        (lambda pools, kv: pools.swa_of.__setitem__(kv.pages[0], pools.swa_of[kv.pages[1]]), "two owners"),
        (lambda pools, kv: pools.full_pages._free.pop(), "lost"),
        (lambda pools, kv: pools.full.k[:, :, NULL_PAGE].fill_(1), "null page"),
    ],
)
def test_damage_is_noticed(
    model: MiMoV2ForCausalLM,
    make_pools: Callable[..., DualPools],
    damage: Callable[[DualPools, RequestKV], object],
    message: str,
) -> None:
    pools = make_pools(model.config, full=20, swa=20)
    kv = RequestKV()
    pools.extend(kv, 14)
    kv.length = 14
    pools.check_integrity([kv])
    damage(pools, kv)
    with pytest.raises(AssertionError, match=message):
        pools.check_integrity([kv])
