"""A second architecture in the same engine: Gemma 3 with cache on and off, chunked across its window.

With TRANSOM_GEMMA3 set to a checkpoint folder (see transom.bench.gguf_checkpoint), real weights continue
real text too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.gemma3 import Gemma3ForCausalLM
from transom.llm.model.gemma3_config import Gemma3Config
from transom.llm.model.loader import load_language_model
from transom.tokenizer import Tokenizer

Make = Callable[..., Any]
Check = Callable[..., None]
WINDOW = 16


@pytest.fixture(scope="module")
def gemma() -> CausalLM:
    config = Gemma3Config.from_dict(
        {
            "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW, "sliding_window_pattern": 3, "max_position_embeddings": 4096,
            "eos_token_id": 95,
        }
    )  # fmt: skip
    torch.manual_seed(3)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.2)
    return model.requires_grad_(False)


def cached_tokens(harness: Any, name: str) -> int:
    return next(event.cached_tokens for event in harness.events if getattr(event, "request_id", "") == name)


@pytest.mark.parametrize("chunk", [1, 5, WINDOW, 64])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 3])
def test_chunked_and_cached_runs_equal_the_uncached_one(
    gemma: CausalLM, make_harness: Make, assert_greedy: Check, chunk: int, length: int
) -> None:
    prompt = torch.randint(0, 95, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    harness = make_harness(gemma, cached=True, batch_tokens=chunk)
    for name in ("cold", "warm"):
        harness.submit(name, prompt, max_tokens=WINDOW + 4)
        harness.run()
        assert_greedy(harness.tokens[name], gemma, prompt, WINDOW + 4)
    assert cached_tokens(harness, "cold") == 0
    assert cached_tokens(harness, "warm") == (length - 1) // 4 * 4
    harness.assert_nothing_left()


def test_batched_requests_do_not_notice_each_other(
    gemma: CausalLM, make_harness: Make, assert_greedy: Check
) -> None:
    harness = make_harness(gemma, batch_tokens=24)
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, 95, (length,), generator=generator).tolist() for length in (3, 40, 17, 64)]
    for number, prompt in enumerate(prompts):
        harness.submit(f"r{number}", prompt, max_tokens=20)
    harness.run()
    for number, prompt in enumerate(prompts):
        assert_greedy(harness.tokens[f"r{number}"], gemma, prompt, 20)


@pytest.mark.skipif("TRANSOM_GEMMA3" not in os.environ, reason="TRANSOM_GEMMA3 names no checkpoint folder")
def test_real_weights_continue_real_text_across_the_window(make_harness: Make, assert_greedy: Check) -> None:
    folder = Path(os.environ["TRANSOM_GEMMA3"])
    model = load_language_model(folder, dtype=torch.float32, device="cpu")
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    ids = [2, *Tokenizer.from_folder(folder).encode(text)]
    harness = make_harness(model, full=200, swa=150, page_size=16, cached=True, batch_tokens=256)
    for length in (500, 560, 1100):
        for name in (f"cold-{length}", f"warm-{length}"):
            harness.submit(name, ids[:length], max_tokens=24)
            harness.run()
            assert_greedy(harness.tokens[name], model, ids[:length], 24)
        assert cached_tokens(harness, f"warm-{length}") == (length - 1) // 16 * 16
