"""Random answers that a grammar allows, one token at a time, as a model without any sense would give them."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from transom.tokenizer import Tokenizer

# What ends things; tried from another one on at each step, once an answer has grown long enough.
CLOSERS = ("</parameter>", '"', "}", "]", "\n</function>\n</tool_call>", ",", "0", "true", "1", ":", "xy")


def allowed(matcher: LLMatcher, vocab_size: int) -> list[int]:
    """Return the ids that the mask lets through."""
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits[:vocab_size]).tolist()
    return found


def matcher_of(text: str, vocabulary: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def random_answer(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random, free: int = 40) -> list[int]:
    """Return the tokens of a whole answer: `free` arbitrary ones at most, then the shortest way to an end."""
    ids: list[int] = []
    eos = set(tokenizer.eos_ids)
    for step in range(1000):
        choices = allowed(matcher, tokenizer.vocab_size)
        assert choices, tokenizer.decode(ids, skip_special=False)
        if eos.intersection(choices) and (step >= free or set(choices) <= eos or rng.random() < 0.05):
            return ids
        if step < free:
            taken = [rng.choice(choices)]
            while eos.issuperset(taken):
                taken = [rng.choice(choices)]
        else:
            taken = _closing(matcher, tokenizer, rng) or [rng.choice([id for id in choices if id not in eos])]
        assert matcher.consume_tokens(taken), matcher.get_error()
        ids += taken
    raise AssertionError(f"no end: {tokenizer.decode(ids[:400], skip_special=False)!r}")


def _closing(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    first = rng.randrange(len(CLOSERS))
    for text in CLOSERS[first:] + CLOSERS[:first]:
        ids = tokenizer.encode(text)
        if matcher.deep_copy().validate_tokens(ids) == len(ids):
            return ids
    return []
