"""The tokenizer against the `tokenizers` library itself, and its stream against decoding at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from transom.errors import CheckpointError, RequestError
from transom.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps",
    "über größe naïve",
    "日本語のテキスト 🙂🙃👩‍👩‍👧",
    "    tabs\tand\nlines 123",
]
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if tools %}
    {{- tools | tojson }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def build(folder: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", special=False), "two words ☃"])
    backend.save(str(folder / "tokenizer.json"))
    return backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build(folder)
    config = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


ids_lists = st.lists(st.integers(0, 410), max_size=60)


@settings(deadline=None)
@given(ids=ids_lists, cuts=st.lists(st.integers(0, 60), max_size=6), skip=st.booleans())
def test_stream_joins_to_decoding_at_once(
    tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    stream = tokenizer.detokenizer(skip_special=skip)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    text = "".join(stream.push(ids[a:b]) for a, b in pairwise(edges)) + stream.flush()
    assert text == oracle.decode(ids, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_special=skip)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_valid_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = tokenizer.detokenizer()
    so_far = ""
    for id in tokenizer.encode(text, special=False):
        so_far += stream.push([id])
        assert text.startswith(so_far)
    assert so_far == text
    assert stream.flush() == ""


def test_a_family_emoji_arrives_whole(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(char) for char in pre_tokenizers.ByteLevel(False).pre_tokenize_str("👩")[0][0]]
    assert None not in ids
    assert len(ids) == 4
    stream = tokenizer.detokenizer()
    assert [stream.push([id]) for id in ids if id is not None] == ["", "", "", "👩"]


def test_flush_shows_a_cut_character_once_and_starts_afresh(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é", special=False)[:1]
    if tokenizer.decode(half) == "é":
        half = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\xc3"]
    stream = tokenizer.detokenizer()
    assert stream.push(half) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(tokenizer.encode("ok")) == "ok"


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_encode_agrees_with_the_library(
    tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False).ids


def test_control_tokens_are_parsed_or_taken_as_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.encode("a<|im_end|>")[-1] == end
    plain = tokenizer.encode("a<|im_end|>", special=False)
    assert end not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>"


def test_lone_surrogates_are_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("bad \ud83d half")


def test_properties(tokenizer: Tokenizer, oracle: tokenizers.Tokenizer) -> None:
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.vocab_size == oracle.get_vocab_size()
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<|nowhere|>") is None
    assert tokenizer.token_bytes(10**6) == b""


def test_chat_rendering(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "a < b & ü"}], tools=[{"name": "<ü>"}])
    assert text == ('<|im_start|>user\na < b & ü<|im_end|>[{"name": "<ü>"}]<|im_start|>assistant\n')
    assert tokenizer.render_chat([], add_generation_prompt=False) == ""


def with_template(folder: Path, tmp_path: Path, template: str) -> Tokenizer:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "eos_token": {"content": "<|im_end|>"}})
    )
    return Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ eos_token }}{{ thinking }}", "<|im_end|>False"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_template_features(folder: Path, tmp_path: Path, template: str, expected: str) -> None:
    assert with_template(folder, tmp_path, template).render_chat([], thinking=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content.missing.attribute }}", "no element 0"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_refuses_is_a_bad_request(
    folder: Path, tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        with_template(folder, tmp_path, template).render_chat([])


def test_a_broken_template_is_a_broken_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        with_template(folder, tmp_path, "fine\n{% for %}")


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).render_chat([])


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_a_missing_or_broken_tokenizer_names_the_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_broken_side_files_are_named(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*list"):
        Tokenizer.from_folder(tmp_path)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    backend = build(tmp_path)
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer.from_folder(tmp_path)


def test_importing_the_tokenizer_leaves_torch_unloaded() -> None:
    code = "import sys, transom.tokenizer; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def build_over_text(folder: Path) -> tokenizers.Tokenizer:
    """A vocabulary over text: spaces as U+2581, characters it lacks as single bytes."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator([text.replace(" ", "\u2581") for text in CORPUS[:2]], trainer)
    backend.save(str(folder / "tokenizer.json"))
    return backend


@given(st.text(max_size=40), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_a_vocabulary_over_text_goes_there_and_back(text: str, step: int) -> None:
    tokenizer, backend = OVER_TEXT
    ids = tokenizer.encode(text, special=False)
    plain = text.replace("\u2581", " ")  # the spelling of a space reads as one
    assert tokenizer.decode(ids, skip_special=False) == plain
    if "\ufffd" not in text:
        assert backend.decode(ids, skip_special_tokens=False) == plain
    stream = tokenizer.detokenizer(skip_special=False)
    pieces = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(pieces) + stream.flush() == plain
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def _over_text() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    with tempfile.TemporaryDirectory() as name:
        backend = build_over_text(Path(name))
        return Tokenizer.from_folder(name), backend


OVER_TEXT = _over_text()
