"""The fields that steer generation, shared by chat and plain completions.

Pure; runs in the gateway process. A field that would change the answer and that nothing here honours is
refused by name; fields without effect on the answer are ignored, as OpenAI's own API does.
"""

from __future__ import annotations

import secrets
from typing import Any

from transom.gateway.api_requests import MAX_STOP_CHARS, MAX_STOPS
from transom.gateway.fields import Fields, show
from transom.gateway.schema import Generation, Limits
from transom.messages import Sampling

_SEED_MASK = (1 << 63) - 1

# Field -> the values that ask for nothing. Anything else is refused by name.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "web_search_options": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "suffix": ("",),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "lora_path": (),
    "spaces_between_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_token_ids": (False,),
}


def _equal(given: Any, value: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)


def refuse_unsupported(body: Fields) -> None:
    """Raise RequestError for the first field that asks for something that isn't there."""
    for name, harmless in UNSUPPORTED.items():
        if body.has(name) and not any(_equal(body.raw[name], one) for one in harmless):
            raise body.refuse(name, "this field is not supported")
    modalities = body.array("modalities")
    if any(item != "text" for item in modalities):
        raise body.refuse("modalities", "only text can be generated")


def parse_generation(
    body: Fields, limits: Limits, *, default_max_tokens: int, top_logprobs: int | None
) -> Generation:
    """Read everything but the prompt; `top_logprobs` is spelled differently by the two APIs."""
    refuse_unsupported(body)
    max_tokens = _max_tokens(body)
    min_tokens: int = body.integer("min_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise body.refuse("min_tokens", f"{min_tokens} is more than max_tokens ({max_tokens})")
    stream = body.flag("stream")
    return Generation(
        model=body.text("model"),
        sampling=_sampling(
            body, limits, max_tokens or max(default_max_tokens, min_tokens), min_tokens, top_logprobs
        ),
        max_tokens_given=max_tokens is not None,
        n=body.integer("n", le=limits.max_choices),
        stop=_stop(body),
        stream=stream,
        **_usage_options(body, stream),
        cache_salt=body.text("cache_salt"),
        priority=body.integer("priority"),
        timeout_s=body.number("timeout", le=limits.max_timeout_s),
    )


def _max_tokens(body: Fields) -> int | None:
    old = body.integer("max_tokens")
    new = body.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise body.refuse("max_tokens", f"{old} contradicts max_completion_tokens ({new})")
    return old if new is None else new  # type: ignore[no-any-return]


def _sampling(
    body: Fields, limits: Limits, max_tokens: int, min_tokens: int, top_logprobs: int | None
) -> Sampling:
    top_p = body.number("top_p")
    top_k = max(body.integer("top_k", le=limits.vocab_size), 0)
    if top_p == 0:  # the smallest nucleus that holds any mass is the best token
        top_p, top_k = 1.0, 1
    seed = body.integer("seed")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=body.number("temperature"),
        top_p=top_p,
        top_k=top_k,
        min_p=body.number("min_p"),
        repetition_penalty=body.number("repetition_penalty"),
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        seed=secrets.randbits(63) if seed is None else seed & _SEED_MASK,
        ignore_eos=body.flag("ignore_eos"),
        stop_token_ids=_token_ids(body, limits),
        logit_bias=_logit_bias(body, limits),
        top_logprobs=top_logprobs,
    )


def _token_ids(body: Fields, limits: Limits) -> tuple[int, ...]:
    found = body.array("stop_token_ids")
    for number, item in enumerate(found):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < limits.vocab_size:
            raise body.refuse(
                f"stop_token_ids[{number}]", f"{show(item)} is no token id, 0 to {limits.vocab_size - 1}"
            )
    return tuple(found)


def _logit_bias(body: Fields, limits: Limits) -> dict[int, float]:
    given = body.object("logit_bias")
    if given is None:
        return {}
    bias: dict[int, float] = {}
    for key in given.raw:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < limits.vocab_size):
            raise body.refuse("logit_bias", f"{show(key)} is no token id, 0 to {limits.vocab_size - 1}")
        value = given.number(key)
        if value is not None:
            bias[int(key)] = value
    return bias


def _stop(body: Fields) -> tuple[str, ...]:
    given = body.raw.get("stop")
    if given is None:
        return ()
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise body.refuse("stop", "expected a string or an array of strings")
    if len(given) > MAX_STOPS:
        raise body.refuse("stop", f"{len(given)} strings, at most {MAX_STOPS} are allowed")
    for number, item in enumerate(given):
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
            raise body.refuse(f"stop[{number}]", f"expected a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(given))


def _usage_options(body: Fields, stream: bool) -> dict[str, bool]:
    options = body.object("stream_options")
    if options is None:
        return {}
    if not stream:
        raise body.refuse("stream_options", "only allowed together with stream: true")
    wanted, continuous = bool(options.flag("include_usage")), bool(options.flag("continuous_usage_stats"))
    return {"include_usage": wanted, "continuous_usage": wanted and continuous}


def chat_logprobs(body: Fields) -> int | None:
    """Return how many alternatives a chat request wants with each token; None: no log-probabilities."""
    wanted = body.flag("logprobs")
    top = body.integer("top_logprobs")
    if not wanted:
        if top:
            raise body.refuse("top_logprobs", "only allowed together with logprobs: true")
        return None
    return top or 0


def completion_logprobs(body: Fields) -> int | None:
    """Return the same for a plain completion, where `logprobs` is the number itself."""
    value: int | None = body.integer("logprobs")
    return value
