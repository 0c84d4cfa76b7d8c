"""Writes the grammar of a chat's answer: JSON by a schema, tool calls, or either of them.

In llguidance's form of Lark, over the token ids of the served checkpoint. Pure; gateway process.
"""

from __future__ import annotations

from typing import Any

from transom.errors import RequestError
from transom.gateway.json_schema import inline_json
from transom.gateway.prompt import Prompt
from transom.gateway.reasoning_parser import CLOSE, OPEN
from transom.gateway.schema import AnswerSchema, ChatRequest
from transom.gateway.tool_grammar import ToolGrammar
from transom.messages import Grammar
from transom.tokenizer import Tokenizer

# Forcing off: the model splits the answer into tokens as it does without a grammar, and the mask is exactly
# what the grammar allows.
_HEAD = '%llguidance {"no_forcing": true}\n'


def answer_grammar(request: ChatRequest, prompt: Prompt, tokenizer: Tokenizer) -> Grammar | None:
    """Return what the answer must match; None when it is free.

    Raise RequestError when the checkpoint has no tokens for what is asked.
    """
    rules: list[str] = []
    answers: list[str] = []
    schema, choice = request.answer_schema, request.tool_choice
    restricted = choice.forced or choice.allowed is not None
    if request.tools and (restricted or request.strict_tools or schema is not None):
        calls = ToolGrammar(_callable(request), request.strict_tools, tokenizer)
        single = not request.parallel_tool_calls or choice.name is not None
        if choice.forced:
            answers.append(calls.forced(choice.name, begun=bool(prompt.forced), single=single))
        elif schema is not None:
            answers.append(calls.calls(single=single))
        else:
            param = "tool_choice" if choice.allowed is not None else "tools"
            answers.append(calls.among_text(single=single, param=param))
        rules += calls.rules
    if schema is not None and not choice.forced:
        answers.append("JSON_BLANKS? json_answer")
        rules += [r"JSON_BLANKS: / |\n{1,2}/", f"json_answer: {inline_json(schema.schema)}"]
    if not answers:
        return None
    text = _HEAD + "\n".join([f"start: {' | '.join(answers)}", *rules]) + "\n"
    return _with_thinking(text, _param(request, schema), request, prompt, tokenizer)


def _callable(request: ChatRequest) -> list[dict[str, Any]]:
    allowed = request.tool_choice.allowed
    return [one for one in request.tools if allowed is None or one["function"]["name"] in allowed]


def _param(request: ChatRequest, schema: AnswerSchema | None) -> str:
    """Return the field to name when the grammar can't be compiled."""
    if schema is not None and not request.tool_choice.forced:
        return schema.param
    for tool in _callable(request):
        strict = request.strict_tools.get(tool["function"]["name"])
        if strict is not None:
            return strict.param
    return "tools"


def _with_thinking(
    text: str, param: str, request: ChatRequest, prompt: Prompt, tokenizer: Tokenizer
) -> Grammar:
    """Say whether the answer may think first: not once the prompt has closed the thinking."""
    think_open, think_close = tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
    if think_open is None or think_close is None:
        if prompt.inside_reasoning:
            raise RequestError(f"{param}: not supported together with thinking by this model", param=param)
        return Grammar(text=text, param=param)
    if prompt.inside_reasoning:
        return Grammar(text=text, param=param, think_close=think_close, thinking=True)
    if prompt.reasoning_closed or prompt.forced or request.enable_thinking is False:
        return Grammar(text=text, param=param)
    return Grammar(text=text, param=param, think_open=think_open, think_close=think_close)
