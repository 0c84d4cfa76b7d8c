"""The model as the gateway serves it, and what turns a checked request into one that fits it.

Loaded once at start; its methods run in threads when a request is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transom.errors import ContextLengthError
from transom.gateway import api_requests as api
from transom.gateway.config import GatewayConfig
from transom.gateway.http_body import Body
from transom.gateway.model_info import ModelInfo
from transom.gateway.output import ChoiceOutput
from transom.gateway.parse import load_body, parse_messages, parse_thinking, parse_tools, token_ids
from transom.gateway.prompt import Prompt, PromptBuilder
from transom.gateway.reasoning_parser import ReasoningParser
from transom.gateway.schema import ChatRequest, Generation, Limits
from transom.gateway.shield import refuse_long
from transom.gateway.tool_parser import ToolParser
from transom.hub import resolve_model
from transom.messages import Sampling, TextPart
from transom.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """`names` are those that clients may ask for, the main one first."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    info: ModelInfo
    builder: PromptBuilder
    limits: Limits
    max_context: int

    @classmethod
    def load(cls, config: GatewayConfig) -> Model:
        """Read the checkpoint's text side; blocks (a hub id may be downloaded)."""
        folder = resolve_model(config.model)
        tokenizer = Tokenizer.from_folder(folder)
        info = ModelInfo.from_folder(folder, tokenizer)
        max_context = min(config.max_context or info.max_context, info.max_context)
        default_name = Path(config.model).name or config.model
        return cls(
            names=config.served_model_name or tuple(dict.fromkeys((default_name, config.model))),
            tokenizer=tokenizer,
            info=info,
            builder=PromptBuilder(tokenizer, info, max_context),
            limits=Limits(
                vocab_size=tokenizer.vocab_size,
                default_max_tokens=config.default_max_tokens,
                max_choices=config.max_choices,
                max_media_items=config.max_media_items,
                max_media_bytes=config.max_media_mb * 1024 * 1024,
                max_timeout_s=config.request_timeout_s,
            ),
            max_context=max_context,
        )

    def parse_tokenize(self, body: Body) -> tuple[str | None, str | ChatRequest]:
        """Return (model name, what is to be tokenised) of the body of POST /tokenize."""
        fields = load_body(body, api.TokenizeRequest)
        name: str | None = fields.text("model")
        prompt = fields.text("prompt", required=not fields.has("messages"))
        tools, thinking = parse_tools(fields), parse_thinking(fields)
        add_generation_prompt = fields.flag("add_generation_prompt")
        if not fields.has("messages"):
            return name, prompt
        if prompt is not None:
            raise fields.refuse("prompt", "only allowed without messages")
        messages, media = parse_messages(fields, self.limits)
        return name, ChatRequest(
            generation=Generation(model=name, sampling=Sampling(max_tokens=1), max_tokens_given=True),
            messages=messages,
            media=media,
            tools=tools,
            enable_thinking=thinking,
            add_generation_prompt=add_generation_prompt,
        )

    def tokenize(self, asked: str | ChatRequest) -> list[int]:
        """Return the ids of a raw prompt or of a chat; a media item stands as one pad."""
        if isinstance(asked, str):
            refuse_long(self.tokenizer, asked, self.max_context, param="prompt", special=True)
            return self.tokenizer.encode(asked)
        pads = {modality: id for id, modality in self.info.pads.items()}
        ids: list[int] = []
        for part in self.builder.chat(asked).parts:
            ids += part.token_ids if isinstance(part, TextPart) else [pads[part.modality]]
        return ids

    def detokenize(self, body: Body) -> tuple[str | None, str]:
        """Return (model name, text) of the body of POST /detokenize."""
        fields = load_body(body, api.DetokenizeRequest)
        given = fields.array("tokens", required=True)
        if len(given) > self.max_context:
            raise ContextLengthError(
                f"tokens: {len(given)} items, at most {self.max_context}, the context, are allowed",
                param="tokens",
            )
        ids = token_ids(given, "tokens", self.limits)
        return fields.text("model"), self.tokenizer.decode(ids, skip_special=False)


def fit_context(prompt: Prompt, generation: Generation, max_context: int, param: str) -> int:
    """Return the output limit that fits; raise ContextLengthError when what the client asked for can't.

    `param` is the field of the prompt. Counts the text only: what media items take is known to the
    prefill worker first.
    """
    wanted, least = generation.sampling.max_tokens, generation.sampling.min_tokens
    room = max_context - prompt.text_tokens
    name, needed = ("max_tokens", wanted) if generation.max_tokens_given else ("min_tokens", least)
    if room < max(needed, 1):
        asked = f" and {name} {needed}" if needed else ""
        raise ContextLengthError(
            f"the model's context is {max_context} tokens; the prompt's text has {prompt.text_tokens}{asked}",
            param=name if room > 0 else param,
        )
    return min(wanted, room)


def chat_output(
    tokenizer: Tokenizer, request: ChatRequest, reasoning: ReasoningParser, forced: str
) -> ChoiceOutput:
    """Return what turns the tokens of one choice of a chat into its answer."""
    return ChoiceOutput(
        tokenizer,
        stop=request.generation.stop,
        min_tokens=request.generation.sampling.min_tokens,
        reasoning=reasoning,
        tools=ToolParser(request.tools) if request.tools else None,
        single_tool_call=not request.parallel_tool_calls or request.tool_choice.name is not None,
        forced=forced,
        named_tool=request.tool_choice.name is not None,
    )
