"""Picks tokens from logits, a whole batch at a time (device thread; knows neither pools nor processes).

Randomness is a pure function of a request's seed and the output index, and each row's arithmetic depends on
its own settings only: the same tokens come out whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transom.errors import RequestError
from transom.llm.constraint import Constraint, masks
from transom.messages import Sampling, TokenLogprob

_LEAST_TEMPERATURE = 1e-4  # below it the softmax is one-hot in fp32 and the division may overflow
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise RequestError for a value that no arithmetic below could take."""
    ranges = {
        "max_tokens": (sampling.max_tokens, 1, math.inf),
        "min_tokens": (sampling.min_tokens, 0, sampling.max_tokens),
        "temperature": (sampling.temperature, 0, 100),
        "top_p": (sampling.top_p, 0, 1),
        "top_k": (sampling.top_k, 0, math.inf),
        "min_p": (sampling.min_p, 0, 1),
        "repetition_penalty": (sampling.repetition_penalty, 1e-3, 1e3),
        "presence_penalty": (sampling.presence_penalty, -100, 100),
        "frequency_penalty": (sampling.frequency_penalty, -100, 100),
        "top_logprobs": (sampling.top_logprobs or 0, 0, 100),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise RequestError(f"{name} is {value}, allowed {low} to {high}", param=name)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size or not -1e3 <= bias <= 1e3:
            raise RequestError(
                f"logit_bias of token {token} is {bias}, allowed tokens 0 to {vocab_size - 1}",
                param="logit_bias",
            )


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends on (seed, index) alone: SplitMix64 (Steele et al. 2014)."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    # 48 bits: the product with a double below stays strictly below the total it is scaled to.
    return (mix((mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK) >> 16) / (1 << 48)


class SamplerState:
    """What sampling remembers of one request: counts for penalties, biases. Tensors only where needed.

    `constraint` is what the answer must match, None for a free one. `ends` are the tokens that would end it.
    """

    __slots__ = ("_bias", "_counts", "_seen", "constraint", "ends", "sampling")

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        device: torch.device,
        constraint: Constraint | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self.ends = [*(() if sampling.ignore_eos else eos_ids), *sampling.stop_token_ids]
        self._bias: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        penalised = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        if penalised or sampling.logit_bias:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._bias = torch.zeros(vocab_size, device=device)
            for token, bias in sampling.logit_bias.items():
                self._bias[token] = bias

    @property
    def remembers(self) -> bool:
        """Tell whether a draw depends on the tokens drawn before it."""
        return self.constraint is not None or self._counts is not None

    @property
    def adjustment(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(how often each token was put out, whether it was seen at all, bias), or None: logits stay."""
        if self._counts is None or self._seen is None or self._bias is None:
            return None
        return self._counts, self._seen, self._bias

    def observe_prompt(self, token_ids: Sequence[int]) -> None:
        if self._seen is not None:
            self._seen[torch.tensor(token_ids, device=self._seen.device)] = True

    def observe(self, token_ids: Iterable[int]) -> None:
        """Take note of output tokens."""
        if self.constraint is not None:
            token_ids = list(token_ids)
            for token in token_ids:
                self.constraint.advance(token)
        if self._counts is None or self._seen is None:
            return
        for token in token_ids:
            self._counts[token] += 1
            self._seen[token] = True


@dataclass(frozen=True, slots=True)
class Draw:
    """The token of one row; None when its logits were not finite, or for the reason in `error`."""

    token: int | None
    logprob: TokenLogprob | None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities of some rows: `counts` says of which and how many they want beside the drawn one."""

    counts: dict[int, int]
    own: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor


class Drawn:
    """What was drawn, on its way to the host. `tokens` (rows,) are on the device, 0 where there is none."""

    def __init__(
        self,
        tokens: torch.Tensor,
        finite: torch.Tensor | None = None,
        errors: Mapping[int, RequestError] | None = None,
        logprobs: _Logprobs | None = None,
    ) -> None:
        self.tokens = tokens
        self._errors = errors or {}
        self._counts = logprobs.counts if logprobs else {}
        parts = [tokens] if finite is None else [tokens, finite]
        parts += [logprobs.own, logprobs.values, logprobs.ids] if logprobs else []
        # Copied now: asked for later, the copies would wait for the next batch as well.
        self._parts = [part.to("cpu", non_blocking=True) for part in parts]
        self._arrived = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        """Block until the device has got this far."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def draws(self) -> list[Draw]:
        """Return the draw of each row; waits for them."""
        self.wait()
        tokens: list[int] = self._parts[0].tolist()
        if not tokens:
            return []
        logprobs = self._read_logprobs(tokens)
        errors, finite = self._errors, self._parts[1].tolist()
        return [
            Draw(token, logprobs.get(i)) if ok and i not in errors else Draw(None, None, errors.get(i))
            for i, (token, ok) in enumerate(zip(tokens, finite))
        ]

    def _read_logprobs(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        if not self._counts:
            return {}
        own, values, ids = (part.tolist() for part in self._parts[2:])
        return {
            i: TokenLogprob(tokens[i], logprob, list(zip(top_ids[:count], top_values[:count])))
            for (i, count), logprob, top_ids, top_values in zip(self._counts.items(), own, ids, values)
        }


def sample(logits: torch.Tensor, states: Sequence[SamplerState], indices: Sequence[int]) -> Drawn:
    """Pick one token per row of fp32 logits (rows, vocab); `indices` are the rows' output indices.

    Log-probabilities are those of the model, before penalties, biases, grammar and temperature. Nothing here
    waits for the device but the grammars' masks.
    """
    finite = logits.sum(-1).isfinite()
    adjusted, errors = _constrain(_adjust(logits, states), states)
    adjusted = _keep_going(adjusted, states, indices)
    tokens = adjusted.argmax(-1)
    drawn = [i for i, state in enumerate(states) if state.sampling.temperature >= _LEAST_TEMPERATURE]
    for rows in (
        [i for i in drawn if _sorts(states[i].sampling)],
        [i for i in drawn if not _sorts(states[i].sampling)],
    ):
        if rows:
            index = _upload(rows, logits.device)
            settings = [states[i].sampling for i in rows]
            numbers = [uniform(states[i].sampling.seed, indices[i]) for i in rows]
            tokens[index] = draw(filtered(adjusted.index_select(0, index), settings), numbers)
    # Without a number there is no token, and what NaN led to may not even be in the vocabulary.
    tokens = tokens.masked_fill_(~finite, 0)
    return Drawn(tokens, finite, errors, _logprobs(logits, states, tokens))


def _upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy host values without waiting for what the device computes now."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _sorts(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def _adjust(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Apply penalties and biases. Repetition counts prompt and output, the other two the output only."""
    adjustments = {i: a for i, state in enumerate(states) if (a := state.adjustment) is not None}
    if not adjustments:
        return logits
    counts, seen, bias = (torch.stack(x) for x in zip(*adjustments.values()))
    settings = [states[i].sampling for i in adjustments]
    repetition, presence, frequency = _upload(
        [[s.repetition_penalty, s.presence_penalty, s.frequency_penalty] for s in settings], logits.device
    ).T[:, :, None]
    index = _upload(list(adjustments), logits.device)
    rows = logits.index_select(0, index)
    rows = torch.where(seen, torch.where(rows > 0, rows / repetition, rows * repetition), rows)
    rows = rows - frequency * counts - presence * (counts > 0) + bias
    return logits.index_copy(0, index, rows)


def _constrain(
    logits: torch.Tensor, states: Sequence[SamplerState]
) -> tuple[torch.Tensor, dict[int, RequestError]]:
    """Rule out what the rows' grammars don't allow; return why a row has no token any more, by row."""
    constraints = {i: state.constraint for i, state in enumerate(states) if state.constraint is not None}
    if not constraints:
        return logits, {}
    allowed, errors = masks(list(constraints.values()), logits.shape[-1], logits.device)
    index = _upload(list(constraints), logits.device)
    rows = logits.index_select(0, index).masked_fill(~allowed, -math.inf)
    numbers = list(constraints)
    return logits.index_copy(0, index, rows), {numbers[row]: error for row, error in errors.items()}


def _keep_going(logits: torch.Tensor, states: Sequence[SamplerState], indices: Sequence[int]) -> torch.Tensor:
    """Rule out what would end a row before its `min_tokens`, unless nothing else is left."""
    early = [i for i, state in enumerate(states) if indices[i] < state.sampling.min_tokens and state.ends]
    if not early:
        return logits
    index = _upload(early, logits.device)
    rows = logits.index_select(0, index)
    longer = rows.clone()
    for row, i in enumerate(early):
        longer[row, states[i].ends] = -math.inf
    possible = (longer > -math.inf).any(-1, keepdim=True)
    return logits.index_copy(0, index, torch.where(possible, longer, rows))


def filtered(logits: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Return unnormalised probabilities (rows, vocab) after temperature, top-k, top-p, min-p in that order.

    Top-k keeps exactly k (ties go to the lower id); top-p keeps the fewest most likely tokens whose share of
    what top-k left reaches p; min-p those at least min_p times as likely as the best.
    """
    columns = _upload([[s.temperature, s.top_p, s.min_p] for s in settings], logits.device)
    temperature, top_p, min_p = columns.T[:, :, None]
    probabilities: torch.Tensor = (logits / temperature).softmax(-1)
    keep = probabilities >= min_p * probabilities.amax(-1, keepdim=True)
    if any(_sorts(s) for s in settings):
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        vocab = logits.shape[-1]
        top_k = _upload([s.top_k or vocab for s in settings], logits.device)[:, None]
        ordered = ordered.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, 0.0)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        kept = (before < top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)) & (ordered > 0)
        kept[:, 0] = True
        keep = keep & torch.zeros_like(keep).scatter_(1, order, kept)
    return probabilities.masked_fill(~keep, 0.0)


def draw(weights: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Invert the cumulative distribution of each row of `weights` at its number in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = _upload(numbers, weights.device, torch.float64)[:, None] * cumulative[:, -1:]
    found: torch.Tensor = torch.searchsorted(cumulative, target, right=True)
    return found[:, 0]


def _logprobs(logits: torch.Tensor, states: Sequence[SamplerState], tokens: torch.Tensor) -> _Logprobs | None:
    wanted = {i: state.sampling.top_logprobs for i, state in enumerate(states)}
    counts = {i: count for i, count in wanted.items() if count is not None}
    if not counts:
        return None
    index = _upload(list(counts), logits.device)
    logprobs = logits.index_select(0, index).log_softmax(-1)
    own = logprobs.gather(1, tokens.index_select(0, index)[:, None])[:, 0]
    values, ids = logprobs.topk(min(max(counts.values()), logprobs.shape[-1]), dim=-1)
    return _Logprobs(counts, own, values, ids)
