"""Answers under a grammar: the mask against brute force, the engine against what a free model would say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from transom.errors import RequestError
from transom.llm.constraint import Constraint, masks
from transom.llm.request import Request, Start
from transom.llm.sampler import SamplerState, sample
from transom.messages import Grammar, Sampling

VOCAB = 96  # of the tiny model
EOS, OPEN, CLOSE = 95, 93, 92
CPU = torch.device("cpu")
HEAD = '%llguidance {"no_forcing": true}\nstart: j\nj: '
LIST = HEAD + '%json {"type": "array", "items": {"type": "integer"}, "minItems": 2}'
# Single characters, pieces that cross borders of the grammar, half a character, and control tokens.
PIECES = [
    *(bytes([code]) for code in range(0x20, 0x7F) if chr(code) not in "!|~`^@#$%&"),
    b'":', b", ", b"12", b'"a', b"]}", "é".encode()[:1], "é".encode()[1:],
]  # fmt: skip


class TinyVocabulary:
    """The tokens of the tiny model, as LLTokenizer asks for them."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = EOS
    tokens = [*PIECES, b"</think>", b"<think>", b"<|end|>", b"<|eos|>"]
    special_token_ids = [92, 93, 94, 95]

    def __call__(self, text: Any) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self.tokens.index(bytes([byte])) for byte in data]


VOCABULARY = LLTokenizer(TinyVocabulary(), eos_token=[EOS])  # type: ignore[arg-type]


def text_of(ids: list[int]) -> bytes:
    return b"".join(TinyVocabulary.tokens[id] for id in ids if id < 92)


def constraint(text: str = LIST, *, ignore_eos: bool = False, **thinking: Any) -> Constraint:
    matcher = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    grammar = Grammar(text=text, param="response_format", **thinking)
    return Constraint(grammar, matcher, (EOS,), ignore_eos=ignore_eos)


def allowed(one: Constraint) -> set[int]:
    rows, errors = masks([one], VOCAB, CPU)
    assert not errors
    return set(rows[0].nonzero()[:, 0].tolist())


SCHEMAS = [
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["x", 12]}}, "required": ["a"]},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]+é?$"}]},
    {"type": "object"},
]


@settings(max_examples=40, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 1 << 30), steps=st.integers(0, 25))
def test_the_mask_is_what_brute_force_over_the_vocabulary_finds(
    schema: dict[str, Any], seed: int, steps: int
) -> None:
    """An id is let through exactly when the text with it can still become a whole answer."""
    rng = random.Random(seed)
    text = HEAD + "%json " + json.dumps(schema)
    one = constraint(text)
    done: list[int] = []
    for _ in range(steps):
        choices = sorted(allowed(one) - {EOS})
        if not choices:
            break
        done.append(rng.choice(choices))
        one.advance(done[-1])
    oracle = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(text), log_level=0)
    assert oracle.consume_tokens(done)
    expected = {id for id in range(VOCAB - 1) if oracle.validate_tokens([id])}
    assert allowed(one) == expected | ({EOS} if oracle.is_accepting() else set())


@settings(max_examples=60, deadline=None)
@given(words=st.sets(st.text('a1":,é ', min_size=1, max_size=5), min_size=1, max_size=6), data=st.data())
def test_the_mask_of_a_few_words_is_what_their_prefixes_say(words: set[str], data: st.DataObject) -> None:
    """No library judges here: the answer is one of the words, and its tokens any that spell it."""
    one = constraint('%llguidance {"no_forcing": true}\nstart: ' + " | ".join(map(json.dumps, sorted(words))))
    spelt = [word.encode() for word in words]
    done = b""
    while True:
        expected = {
            id for id, piece in enumerate(PIECES) if any(word.startswith(done + piece) for word in spelt)
        } | ({EOS} if done in spelt else set())
        assert allowed(one) == expected
        token = data.draw(st.sampled_from(sorted(expected)))
        if token == EOS:
            return
        one.advance(token)
        done += PIECES[token]


def test_control_tokens_never_match_text() -> None:
    one = constraint(HEAD + '%json {"type": "string"}')
    one.advance(TinyVocabulary()(b'"')[0])
    assert allowed(one).isdisjoint({92, 93, 94, 95})


def test_thinking_is_free_and_only_its_end_starts_the_grammar() -> None:
    one = constraint(think_close=CLOSE, think_open=OPEN)
    start = allowed(one)
    assert OPEN in start
    assert start - {OPEN} == allowed(constraint())
    one.advance(OPEN)
    for token in (7, 94, 3):
        assert allowed(one) == set(range(VOCAB)) - {EOS}
        one.advance(token)
    one.advance(CLOSE)
    assert allowed(one) == allowed(constraint())
    inside = constraint(think_close=CLOSE, think_open=OPEN, thinking=True)
    assert allowed(inside) == set(range(VOCAB)) - {EOS}


def test_an_answer_may_skip_the_thinking() -> None:
    one = constraint(think_close=CLOSE, think_open=OPEN)
    one.advance(TinyVocabulary()(b"[")[0])
    assert OPEN not in allowed(one)


def test_ignore_eos_ends_only_where_nothing_else_may_follow() -> None:
    number = HEAD + '%json {"type": "integer"}'
    twelve = TinyVocabulary()(b"12")
    plain, longer = constraint(number), constraint(number, ignore_eos=True)
    for one in (plain, longer):
        for token in twelve:
            one.advance(token)
    assert allowed(plain) - {EOS} == allowed(longer)
    assert EOS in allowed(plain)
    closed = constraint(ignore_eos=True)
    for token in TinyVocabulary()(b"[1,2]"):
        closed.advance(token)
    assert allowed(closed) == {EOS}
    closed.advance(EOS)
    assert closed.complete


def test_a_token_outside_the_grammar_ends_the_request_with_its_name() -> None:
    one = constraint()
    one.advance(TinyVocabulary()(b"x")[0])
    _, errors = masks([constraint(), one], VOCAB, CPU)
    assert list(errors) == [1]
    assert errors[1].param == "response_format"
    with pytest.raises(RequestError, match="does not fit the grammar"):
        raise errors[1]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
)
def test_a_batch_is_masked_row_by_row(seed: int, temperature: float, top_k: int) -> None:
    """Free neighbours get what they get alone; a constrained row an allowed id, the best one if greedy."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    sampling = Sampling(max_tokens=9, temperature=temperature, top_k=top_k, seed=seed, logit_bias={3: 100.0})
    states = [SamplerState(sampling, VOCAB, CPU, constraint() if row in (1, 4) else None) for row in range(5)]
    free = [SamplerState(sampling, VOCAB, CPU) for _ in range(5)]
    mixed, plain = (sample(logits.clone(), one, [0] * 5).draws() for one in (states, free))
    assert [mixed[row] for row in (0, 2, 3)] == [plain[row] for row in (0, 2, 3)]
    may = allowed(constraint())
    for row in (1, 4):
        assert mixed[row].token in may
        if temperature == 0:
            assert mixed[row].token == max(may, key=lambda id: (logits[row, id].item(), -id))


# In the engine.


def submit(harness: Any, name: str, prompt: list[int], one: Constraint | None, **sampling: Any) -> None:
    settings = {"max_tokens": 24, "temperature": 0.0, **sampling}
    request: Request = harness.request(
        name, prompt_ids=prompt, prompt_complete=True, sampling=Sampling(**settings), constraint=one
    )
    harness.engine.submit(Start(request))


PROMPTS = [[5, 9, 11], [40, 3, 8, 2, 60], [1] * 7, [77, 20], [33, 34, 35, 36], [60, 61, 62]]


def test_answers_match_and_neighbours_are_untouched(model: Any, make_harness: Callable[..., Any]) -> None:
    """Constrained requests among free ones, with retractions: pages for two and a half of them."""
    alone = make_harness(model)
    for number, prompt in enumerate(PROMPTS):
        submit(alone, f"free{number}", prompt, None, ignore_eos=True)
    alone.run()
    tight = make_harness(model, full=24, swa=18)
    for number, prompt in enumerate(PROMPTS):
        submit(tight, f"free{number}", prompt, None, ignore_eos=True)
        submit(tight, f"json{number}", prompt, constraint(), max_tokens=40, temperature=0.9, seed=number)
    tight.run()
    assert tight.engine.load()["retractions"] > 0
    assert not tight.errors
    ended = 0
    for number in range(len(PROMPTS)):
        assert tight.tokens[f"free{number}"] == alone.tokens[f"free{number}"]
        check = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(LIST), log_level=0)
        tokens = tight.tokens[f"json{number}"]
        assert check.consume_tokens(tokens)
        if tight.finished[f"json{number}"] == "stop":
            ended += 1
            assert len(json.loads(text_of(tokens))) >= 2
        else:
            assert len(tokens) == 40
    assert ended > 0
    tight.assert_nothing_left()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_that_is_valid_anyway_stays_the_same(
    model: Any, make_harness: Callable[..., Any], prompt: list[int]
) -> None:
    harness = make_harness(model)
    # No halves of characters and no control tokens: what is left is text, whatever comes.
    text_only = dict.fromkeys(range(90, VOCAB), -100.0)
    anything = '%llguidance {"no_forcing": true}\nstart: /(?s:.*)/'
    submit(harness, "free", prompt, None, max_tokens=12, logit_bias=text_only)
    submit(harness, "text", prompt, constraint(anything), max_tokens=12, logit_bias=text_only)
    harness.run()
    assert len(harness.tokens["free"]) == 12
    assert harness.tokens["text"] == harness.tokens["free"]


def test_prefill_samples_the_first_token_by_the_grammar_and_decode_goes_on(
    model: Any, make_harness: Callable[..., Any]
) -> None:
    """The matcher of the decode side is built anew from the first token."""
    whole = make_harness(model)
    submit(whole, "r", PROMPTS[0], constraint())
    whole.run()
    prefill, decode = make_harness(model), make_harness(model)
    sampling = Sampling(max_tokens=24, temperature=0.0)
    prefill.engine.submit(
        Start(prefill.request("r", prompt_ids=PROMPTS[0], prompt_complete=True, sampling=sampling,
                              hands_off=True, constraint=constraint()))
    )  # fmt: skip
    prefill.run()
    handed = prefill.prefilled["r"]
    decode.prefilled_elsewhere = frozenset({"r"})
    decode.engine.submit(
        Start(decode.request("r", prompt_ids=PROMPTS[0], prompt_complete=True, sampling=sampling,
                             output_ids=[handed.first_token], host_kv=handed.host_kv,
                             constraint=constraint()))
    )  # fmt: skip
    decode.run()
    assert prefill.tokens["r"] + decode.tokens["r"] == whole.tokens["r"]
    assert text_of(whole.tokens["r"]).startswith(b"[")


def test_max_tokens_cuts_the_answer_and_the_end_comes_despite_ignore_eos(
    model: Any, make_harness: Callable[..., Any]
) -> None:
    harness = make_harness(model)
    submit(harness, "cut", PROMPTS[1], constraint(), max_tokens=3)
    one_word = constraint('%llguidance {"no_forcing": true}\nstart: "ab"', ignore_eos=True)
    submit(harness, "whole", PROMPTS[1], one_word, ignore_eos=True)
    harness.run()
    assert harness.finished == {"cut": "length", "whole": "stop"}
    assert len(harness.tokens["cut"]) == 3
    assert text_of(harness.tokens["whole"]) == b"ab"


def test_min_tokens_lengthen_an_answer_as_far_as_its_grammar_goes(
    model: Any, make_harness: Callable[..., Any]
) -> None:
    """A model that wants to stop at once: after two numbers by the grammar, after so many without one."""
    harness = make_harness(model)
    ends = {EOS: 100.0}
    submit(harness, "short", PROMPTS[2], constraint(), logit_bias=ends)
    submit(harness, "long", PROMPTS[2], constraint(), logit_bias=ends, min_tokens=12)
    one_word = constraint('%llguidance {"no_forcing": true}\nstart: "ab"')
    submit(harness, "word", PROMPTS[2], one_word, logit_bias=ends, min_tokens=12)
    submit(harness, "free", PROMPTS[2], None, logit_bias=ends, min_tokens=12)
    submit(harness, "none", PROMPTS[2], None, logit_bias=ends)
    harness.run()
    assert text_of(harness.tokens["word"]) == b"ab"
    assert harness.finished["word"] == harness.finished["free"] == harness.finished["none"] == "stop"
    shown = {name: sum(token != EOS for token in tokens) for name, tokens in harness.tokens.items()}
    assert (shown["free"], shown["none"]) == (12, 0)
    check = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(LIST), log_level=0)
    assert check.consume_tokens(harness.tokens["long"])


def test_a_grammar_that_grows_too_dear_fails_its_own_request(
    model: Any, make_harness: Callable[..., Any]
) -> None:
    harness = make_harness(model)
    broken = constraint()
    broken.advance(TinyVocabulary()(b"x")[0])
    submit(harness, "bad", PROMPTS[0], broken)
    submit(harness, "good", PROMPTS[0], constraint())
    harness.run()
    assert harness.errors["bad"].status == 400
    assert harness.errors["bad"].param == "response_format"
    assert "good" in harness.finished
    harness.assert_nothing_left()
