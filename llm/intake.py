"""What enters the engine: new requests and the next pieces of their prompts, checked (engine thread).

Raises TransomErrors that end the one request; knows no pools and no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from transom.errors import ContextLengthError, TransomError
from transom.llm.model.spec import DecoderConfig
from transom.llm.request import EmbeddingRows, Extend, Request
from transom.llm.sampler import SamplerState, check_sampling


class Intake:
    """Puts commands' content into requests. `context_len` counts prompt and output tokens."""

    def __init__(self, config: DecoderConfig, device: torch.device, context_len: int) -> None:
        self._config = config
        self._device = device
        self._context_len = context_len

    def take(self, request: Request) -> None:
        """Check a new request and give it its sampler."""
        vocab_size = self._config.vocab_size
        check_sampling(request.sampling, vocab_size)
        self._check_ids(request.prompt_ids + request.output_ids)
        if request.host_kv is not None:
            request.computed = request.host_kv.length
        eos_ids = self._config.eos_token_ids
        request.sampler = SamplerState(
            request.sampling, vocab_size, self._device, request.constraint, eos_ids
        )
        if request.prompt_complete:
            self._complete_prompt(request)

    def grow(self, request: Request, extend: Extend) -> None:
        """Append the next piece of a prompt: ids and, where it has media, their embeddings."""
        config = self._config
        begin = len(request.prompt_ids)
        self._check_ids(extend.token_ids)
        if extend.rows is not None and extend.offsets:
            expected = len(extend.offsets), config.hidden_size
            if tuple(extend.rows.shape) != expected:
                raise TransomError(f"embeddings of shape {tuple(extend.rows.shape)}, expected {expected}")
            positions = torch.tensor(extend.offsets) + begin
            request.embeddings.append(EmbeddingRows(positions, extend.rows))
            # KV of NaN would fail every later request that finds it: without its key nothing is cached.
            content_key = extend.content_key if bool(torch.isfinite(extend.rows).all()) else ""
            request.media_spans += [(begin + at, n, content_key) for at, n in _runs(extend.offsets)]
        request.prompt_ids += extend.token_ids
        self._check_context(request)
        if extend.complete:
            request.prompt_complete = True
            self._complete_prompt(request)

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab_size = self._config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise TransomError(f"token ids {min(ids)} to {max(ids)}; the vocabulary has {vocab_size}")

    def _check_context(self, request: Request) -> None:
        if len(request.prompt_ids) >= self._context_len:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_ids)} tokens or more; at most {self._context_len} fit,"
                " one output token included"
            )

    def _complete_prompt(self, request: Request) -> None:
        self._check_context(request)
        if not request.prompt_ids:
            raise TransomError("the prompt is empty")
        assert request.sampler is not None
        request.sampler.observe_prompt(request.prompt_ids)
        request.sampler.observe(request.output_ids)
        request.max_tokens = min(request.sampling.max_tokens, self._context_len - len(request.prompt_ids))


def _runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and length of each run of consecutive, ascending offsets."""
    cuts = [0, *(i for i in range(1, len(offsets)) if offsets[i] != offsets[i - 1] + 1), len(offsets)]
    return [(offsets[low], high - low) for low, high in pairwise(cuts)]
