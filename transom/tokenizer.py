"""A checkpoint's tokenizer, chat template and incremental detokenisation (gateway, terminal chat, trainer).

Each id stands for fixed bytes: byte-level BPE, or BPE over text with single bytes for the rest. Loads no
torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from transom.chat_template import ChatTemplate
from transom.errors import CheckpointError, RequestError


def _byte_of_char() -> dict[str, int]:
    """Invert byte-level BPE's alphabet: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(shifted)}


_BYTE_OF_CHAR = _byte_of_char()
_LONG_CHARS = 10_000
_SPACE = "\u2581"  # how vocabularies over text spell a space
_SINGLE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token whose text is not spelt in the byte alphabet
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    single = _SINGLE_BYTE.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace(_SPACE, " ").encode()


def _spelling(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return what turns a token's name into its bytes; raise CheckpointError for an unknown decoder."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return _byte_level
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = list(decoder.get("decoders", ()))
    wanted = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if steps != wanted:
        raise CheckpointError(
            f"tokenizer.json has decoder {backend.decoder!r}; only ByteLevel and Replace, ByteFallback, Fuse"
            " are supported"
        )
    return _byte_fallback


class Tokenizer:
    """Text to ids and back. Safe to share between threads.

    `special_ids` are the control tokens, which decoding leaves out.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, template: ChatTemplate | None, eos_ids: Sequence[int]
    ) -> None:
        self._backend = backend
        self._spelling = _spelling(backend)
        self._template = template
        self._eos_ids = tuple(eos_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, generation_config.json, config.json.

        Raise CheckpointError naming the file that is missing or unreadable.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for every kind of failure
            raise CheckpointError(f"cannot read {path}: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        eos = _eos_ids(folder, config, backend)
        return cls(backend, ChatTemplate.from_folder(folder, config), eos)

    @property
    def vocab_size(self) -> int:
        """Count ids, added tokens included; a model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, the main one first."""
        return self._eos_ids

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens beside the byte-level vocabulary, by their text: control tokens, tags."""
        return {token.content: id for id, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Ids of the added tokens that are no text: special ones, and tags such as <tool_call>."""
        return {
            text: id
            for text, id in self.added_tokens.items()
            if len(text) > 1 and (id in self.special_ids or (text[0] == "<" and text[-1] == ">"))
        }

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this token, such as '<|image_pad|>'; None when there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return ids. With `special` off, the spelling of a control token in `text` is ordinary text.

        Nothing is added in front or behind: the chat template writes all control tokens itself.
        """
        backend = self._backend if special else self._plain_backend
        try:
            if len(text) > _LONG_CHARS:
                # Alone of all calls this one lets other threads go on: a long text takes seconds.
                (found,) = backend.encode_batch_fast([text], add_special_tokens=False)
            else:
                found = backend.encode(text, add_special_tokens=False)
            ids: list[int] = found.ids
        except TypeError as error:  # what tokenizers makes of a str that has no UTF-8 form
            raise RequestError("the text holds a lone surrogate, which is no Unicode character") from error
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        stream = IncrementalDetokenizer(self, skip_special)
        return stream.push(ids) + stream.flush()

    def detokenizer(self, skip_special: bool = True) -> IncrementalDetokenizer:
        """Return a fresh stream for the output of one request."""
        return IncrementalDetokenizer(self, skip_special)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes an id stands for; empty for an id outside the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            known = self._spelling(self._backend.id_to_token(id) or "")
            self._bytes[id] = known
        return known

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text for chat messages; `kwargs` reach the template under their names.

        Raise RequestError when the template refuses the messages or the model has no template.
        """
        if self._template is None:
            raise RequestError("this model has no chat template", param="messages")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # Without its added tokens nothing is cut out of the text before the byte-level model sees it.
        bare = json.loads(self._backend.to_str()) | {"added_tokens": [], "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(bare))


class IncrementalDetokenizer:
    """Turn ids into text as they come. The pieces join to what decoding all ids at once gives."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that became certain; bytes of an unfinished character wait for the next push."""
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(id) for id in ids if id not in self._skipped))

    def flush(self) -> str:
        """Return what still waits, as U+FFFD, and start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in an optional file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _eos_ids(folder: Path, tokenizer_config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> list[int]:
    """Join what generation_config, config and tokenizer_config say: a chat model often has two."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    token = tokenizer_config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        id = backend.token_to_id(text)
        found += [] if id is None else [id]
    return list(dict.fromkeys(found))
