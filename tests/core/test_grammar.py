"""The compiler of grammars: one compile a text, bounds of time, size and number, and the event loop free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

import transom.grammar as grammar_module
from tests.patience import PATIENCE_S
from transom.errors import OverloadedError, RequestError, TransomError
from transom.grammar import GrammarCompiler, grammar_tokenizer
from transom.hub import resolve_model
from transom.messages import Grammar
from transom.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model("mimo-nano"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return grammar_tokenizer(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size + 5)


@pytest.fixture
def compiler(vocabulary: LLTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler()
    compiler.load(lambda: vocabulary)
    yield compiler
    compiler.close()


def grammar(word: str) -> Grammar:
    return Grammar(text=f'start: "{word}"', param="response_format")


async def test_a_text_is_compiled_once_and_each_matcher_is_fresh(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    first, second = await asyncio.gather(compiler.matcher(grammar("ab")), compiler.matcher(grammar("ab")))
    third = await compiler.matcher(grammar("ab"))
    assert first.consume_tokens(tokenizer.encode("ab"))
    assert first.is_accepting()
    assert not second.is_accepting()
    assert not third.is_accepting()
    assert compiler.figures() == {"grammars_cached": 1, "grammars_compiled": 1, "grammar_cache_hits": 1}


async def test_the_vocabulary_covers_the_rows_of_the_model(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    assert vocabulary.vocab_size == tokenizer.vocab_size + 5
    assert set(vocabulary.eos_tokens) == set(tokenizer.eos_ids)
    assert all(vocabulary.is_special_token(id) for id in tokenizer.control_tokens.values())


async def test_a_wrong_grammar_is_refused_by_its_field_and_remembered(compiler: GrammarCompiler) -> None:
    wrong = Grammar(text='start: json\njson: %json {"format": "no-such"}', param="tools[0]")
    for _ in range(2):
        with pytest.raises(RequestError, match="Unknown format: no-such") as caught:
            await compiler.matcher(wrong)
        assert caught.value.param == "tools[0]"
        assert "start" not in caught.value.message
    assert compiler.figures()["grammars_compiled"] == 1


async def test_a_huge_grammar_is_refused_before_any_work(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="at most 1048576"):
        await compiler.matcher(grammar("a" * 1_100_000))
    assert compiler.figures()["grammars_compiled"] == 0


async def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_CACHED", 2)
    for word in ("a", "b", "a", "c", "a", "b"):
        await compiler.matcher(grammar(word))
    figures = compiler.figures()
    assert figures["grammars_cached"] == 2
    assert figures["grammars_compiled"] == 4  # b went when c came, as a had been used since
    monkeypatch.setattr(grammar_module, "_MAX_CACHED_BYTES", 15)
    await compiler.matcher(grammar("d"))
    assert compiler.figures()["grammars_cached"] == 1


async def test_a_slow_compile_holds_up_nobody_and_ends_at_its_deadline(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_DEADLINE_S", 0.2)
    monkeypatch.setattr(grammar_module, "_MAX_COMPILING", 3)
    go_on, begun = threading.Event(), threading.Semaphore(0)

    compile_now = compiler._compile

    def slow(text: str) -> LLMatcher | str:
        begun.release()
        go_on.wait()
        return compile_now(text)

    monkeypatch.setattr(compiler, "_compile", slow)
    try:
        waiting = [asyncio.create_task(compiler.matcher(grammar(word))) for word in "abc"]
        await asyncio.sleep(0)  # the loop is free: the three have been taken
        for _ in range(2):
            begun.acquire()  # before the loop looks at its deadlines: the threads may have been slow to begin
        with pytest.raises(OverloadedError, match="3 schemas are being compiled"):
            await compiler.matcher(grammar("d"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        # Two threads work; what waits behind them is not at fault.
        assert [type(result) for result in results] == [RequestError, RequestError, OverloadedError]
        assert "takes longer than 0.2 s" in str(results[0])
        go_on.set()
        monkeypatch.setattr(grammar_module, "_DEADLINE_S", PATIENCE_S)
        await compiler.matcher(grammar("a"))
    finally:
        go_on.set()


async def test_a_model_without_an_end_token_says_so(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = GrammarCompiler()
    compiler.load(lambda: grammar_tokenizer(tokenizer, ()))
    assert "no end-of-sequence token" in caplog.text
    with pytest.raises(TransomError, match="no vocabulary"):
        await compiler.matcher(grammar("a"))
    compiler.close()
