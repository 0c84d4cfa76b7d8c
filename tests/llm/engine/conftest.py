"""A tiny random hybrid model with every feature the engine meets, and the uncached run as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from transom.errors import ErrorInfo
from transom.kernels.native_ops import NativeOps
from transom.kernels.ops import FusedOps
from transom.llm.capacity import PoolPlan
from transom.llm.decode_graphs import DecodeGraphs
from transom.llm.engine import Engine, EngineLimits
from transom.llm.model.attention import PackedAttention
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.fused import FusedModel, fused
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.policies import make_order
from transom.llm.pools import DualPools
from transom.llm.prefix_cache import PrefixCache
from transom.llm.radix.retention import RetentionPolicy
from transom.llm.request import AnswerEvent, Event, FailedEvent, PrefilledEvent, Request, Start, TokenEvent
from transom.llm.scheduler import Order
from transom.messages import Sampling

WINDOW = 9
TURN_END = 94

TINY: dict[str, Any] = {
    "model_type": "mimo_v2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "hybrid_layer_pattern": [0, 1, 1, 0, 1],
    "moe_layer_freq": [0, 1, 1, 1, 1],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 8,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "partial_rotary_factor": 0.334,
    "rope_theta": 10_000,
    "swa_rope_theta": 1_000,
    "sliding_window": WINDOW - 1,
    "attention_value_scale": 0.707,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
    "eos_token_id": 95,
}


def build_model(**changes: Any) -> MiMoV2ForCausalLM:
    torch.manual_seed(7)
    model = MiMoV2ForCausalLM(MiMoV2Config.from_dict({**TINY, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=0.25)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.1)
    return model.requires_grad_(False)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> MiMoV2ForCausalLM:
    return build_model()


@pytest.fixture(scope="session")
def tiny_config() -> dict[str, Any]:
    return TINY


@pytest.fixture(scope="session")
def make_model() -> Callable[..., MiMoV2ForCausalLM]:
    return build_model


@pytest.fixture(scope="session")
def make_pools() -> Callable[..., DualPools]:
    def make(
        config: MiMoV2Config,
        *,
        full: int = 400,
        swa: int = 200,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        margin: int = 0,
        clear_pages: bool = True,
        device: torch.device | None = None,
        scratch: bool = False,
    ) -> DualPools:
        plan = PoolPlan(page_size, full + 1, swa + 1, 0, 0)
        device = device or torch.device("cpu")
        return DualPools(
            config,
            plan,
            dtype=dtype,
            device=device,
            margin=margin,
            clear_pages=clear_pages,
            scratch=scratch,
        )

    return make


def greedy_reference(
    model: MiMoV2ForCausalLM,
    prompt: Sequence[int],
    steps: int,
    rows: torch.Tensor | None = None,
    at: Sequence[int] = (),
) -> list[int]:
    """Generate without any cache: the whole prompt anew for each token. `rows` stand at positions `at`."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(steps):
            x = model.embed(torch.tensor(ids)).clone()
            if rows is not None:
                x[list(at)] = rows
            hidden = model(x, torch.arange(len(ids)), PackedAttention([len(ids)]))
            ids.append(int(model.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]


def assert_greedy_output(
    output: Sequence[int],
    model: MiMoV2ForCausalLM,
    prompt: Sequence[int],
    steps: int,
    rows: torch.Tensor | None = None,
    at: Sequence[int] = (),
) -> None:
    """Check `output` against the plain uncached run, in one pass over prompt and output.

    Each token must be the most likely one after those before it, which by induction makes them the tokens of
    a run that computes everything anew for each token.
    """
    assert len(output) == steps
    ids = torch.tensor([*prompt, *output])
    with torch.inference_mode():
        x = model.embed(ids).clone()
        if rows is not None:
            x[list(at)] = rows
        hidden = model(x, torch.arange(len(ids)), PackedAttention([len(ids)]))
        expected = model.logits(hidden[len(prompt) - 1 : -1]).argmax(-1)
    assert list(output) == expected.tolist()


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    return greedy_reference


def fuse_model(model: CausalLM, ops: FusedOps) -> FusedModel:
    """Put a model on kernels which must have it."""
    found = fused(model, ops)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def fuse() -> Callable[[CausalLM, FusedOps], FusedModel]:
    return fuse_model


@pytest.fixture(scope="module")
def native(model: MiMoV2ForCausalLM, native_ops: NativeOps) -> FusedModel:
    return fuse_model(model, native_ops)


@pytest.fixture(scope="session")
def assert_greedy() -> Callable[..., None]:
    return assert_greedy_output


class Harness:
    """Drives an engine step by step and keeps what it says about each request."""

    def __init__(
        self,
        model: MiMoV2ForCausalLM | FusedModel,
        pools: DualPools,
        clock: Callable[[], float],
        cached: bool,
        order: Order,
        answers: bool,
        overlap: bool,
        padded: int,
        **limits: int,
    ) -> None:
        bounds = {"batch_tokens": 64, "running_requests": 16, "context_len": 8192, "swa_release_interval": 4}
        bounds |= limits
        self.pools = pools
        policy = RetentionPolicy(pools.window, pools.page_size, max_extra_tokens=pools.plan.swa_tokens // 4)
        self.cache = None
        if cached:
            self.cache = PrefixCache(pools, "tiny", (TURN_END,), policy=policy, answers=answers)
        self.graphs = None
        if padded:
            assert isinstance(model, FusedModel)
            self.graphs = DecodeGraphs(model, pools, bounds["context_len"], padded)
            self.graphs.warm_up()
        self.engine = Engine(
            model,
            pools,
            EngineLimits(**bounds, overlap=overlap),
            self._take,
            order=order,
            cache=self.cache,
            graphs=self.graphs,
            clock=clock,
        )
        self.tokens: dict[str, list[int]] = {}
        self.events: list[Event] = []
        self.finished: dict[str, str] = {}
        self.errors: dict[str, ErrorInfo] = {}
        self.prefilled: dict[str, PrefilledEvent] = {}
        self.answers: dict[str, AnswerEvent] = {}
        self._arrivals = 0

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, TokenEvent):
                tokens = self.tokens.setdefault(event.request_id, [])
                assert event.index == len(tokens) + (event.request_id in self.prefilled_elsewhere)
                tokens.append(event.token_id)
                if event.finish_reason:
                    self.finished[event.request_id] = event.finish_reason
            elif isinstance(event, FailedEvent):
                self.errors[event.request_id] = event.error
            elif isinstance(event, PrefilledEvent):
                self.prefilled[event.request_id] = event
            elif isinstance(event, AnswerEvent):
                self.answers[event.request_id] = event

    prefilled_elsewhere: frozenset[str] = frozenset()

    def request(self, name: str, **fields: Any) -> Request:
        sampling = fields.pop("sampling", None) or Sampling(
            max_tokens=fields.pop("max_tokens", 8), temperature=0.0, ignore_eos=True
        )
        self._arrivals += 1
        fields.setdefault("deadline_s", 1e12)
        return Request(request_id=name, sampling=sampling, arrived_s=float(self._arrivals), **fields)

    def submit(self, name: str, prompt: Sequence[int], **fields: Any) -> None:
        self.engine.submit(Start(self.request(name, prompt_ids=list(prompt), prompt_complete=True, **fields)))

    def run(self, steps: int = 2000) -> None:
        """Step until every request has left."""
        for _ in range(steps):
            self.engine.step()
            if not self.engine.load()["running_requests"] + self.engine.load()["waiting_requests"]:
                return
        raise AssertionError(f"requests are left after {steps} steps: {self.engine.waiting_reason}")

    def assert_nothing_left(self) -> None:
        """Every slot is free, or with a cache evictable."""
        load = self.engine.load()
        assert load["full_used_slots"] == load["swa_used_slots"] == 0
        if self.cache is not None:
            self.cache.check_integrity()
        else:
            self.pools.check_integrity(())


@pytest.fixture(scope="session")
def make_harness(make_pools: Callable[..., DualPools]) -> Callable[..., Harness]:
    def make(
        model: MiMoV2ForCausalLM | FusedModel,
        *,
        full: int = 400,
        swa: int = 200,
        page_size: int = 4,
        clock: Callable[[], float] = lambda: 0.0,
        cached: bool = False,
        policy: str = "fewest-uncached",
        margin: int = 0,
        answers: bool = False,
        dtype: torch.dtype = torch.float32,
        overlap: bool = False,
        padded: int = 0,
        device: torch.device | None = None,
        **limits: int,
    ) -> Harness:
        """With `padded` decode steps of up to so many rows run in fixed buffers."""
        pools = make_pools(
            model.config,
            full=full,
            swa=swa,
            page_size=page_size,
            margin=margin,
            dtype=dtype,
            scratch=padded > 0,
            device=device,
        )
        order = make_order(policy, lambda: 10.0)
        return Harness(model, pools, clock, cached, order, answers, overlap, padded, **limits)

    return make
