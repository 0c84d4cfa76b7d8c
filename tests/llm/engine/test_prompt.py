"""Prompts come out in order whatever the order of arrival; what does not fit is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.errors import ProtocolError
from transom.llm.prompt import PromptAssembler
from transom.messages import EmbeddingChunk, MediaPart, TensorMeta, TextPart

PAD, SOUND = 7, 8


def chunk(
    item: int, index: int, ids: list[int], *, last: bool = False, rows: int | None = None
) -> EmbeddingChunk:
    pads = sum(token in (PAD, SOUND) for token in ids)
    meta = TensorMeta("float32", (pads if rows is None else rows, 2))
    return EmbeddingChunk(
        request_id="r", item_index=item, chunk_index=index, last=last, content_key="", token_ids=ids,
        pad_ids=(PAD, SOUND), rows=meta,
    )  # fmt: skip


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[TextPart | MediaPart], list[EmbeddingChunk], list[int]]:
    """Return (parts, all chunks in an odd order, the whole prompt)."""
    parts: list[TextPart | MediaPart] = []
    chunks: list[EmbeddingChunk] = []
    whole: list[int] = []
    tokens = st.lists(st.integers(0, 8), min_size=1, max_size=4)
    for item in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            parts.append(TextPart(draw(st.lists(st.integers(0, 8), max_size=4))))
            whole += parts[-1].token_ids
        parts.append(MediaPart(item, draw(st.sampled_from(["image", "video", "audio"]))))
        runs = draw(st.lists(tokens, min_size=1, max_size=4))
        chunks += [chunk(item, i, ids, last=i == len(runs) - 1) for i, ids in enumerate(runs)]
        whole += [token for ids in runs for token in ids]
    return parts, draw(st.permutations(chunks)), whole


@given(prompts())
@settings(max_examples=100, deadline=None)
def test_any_order_gives_the_same_prompt(
    case: tuple[list[TextPart | MediaPart], list[EmbeddingChunk], list[int]],
) -> None:
    parts, chunks, whole = case
    assembler = PromptAssembler(parts, SOUND)
    taken: list[int] = []
    rows = 0
    for arrival in [None, *chunks]:
        if arrival is not None:
            assert not assembler.complete
            assembler.add(arrival, b"")
        for piece in assembler.take():
            taken += piece.token_ids
            rows += len(piece.offsets)
            assert [piece.token_ids[i] in (PAD, SOUND) for i in piece.offsets] == [True] * len(piece.offsets)
        assert taken == whole[: len(taken)]
    assert assembler.complete
    assert taken == whole
    stats = assembler.stats()
    assert stats.prompt_tokens == len(whole)
    assert stats.image_tokens + stats.video_tokens + stats.audio_tokens == rows


def test_the_sound_of_a_video_counts_as_audio() -> None:
    assembler = PromptAssembler([MediaPart(0, "video")], SOUND)
    assembler.add(chunk(0, 0, [PAD, PAD, SOUND, 1], last=True), b"")
    assembler.take()
    stats = assembler.stats()
    assert (stats.prompt_tokens, stats.video_tokens, stats.audio_tokens) == (4, 2, 1)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk(5, 0, [PAD])], "no media item 5"),
        ([chunk(0, 0, [PAD]), chunk(0, 0, [PAD])], "twice"),
        ([chunk(0, 1, [PAD], last=True), chunk(0, 2, [PAD])], "after the last"),
        ([chunk(0, 1, [PAD], last=True), chunk(0, 0, [PAD], last=True)], "after the last"),
        ([chunk(0, 0, [PAD] * 3, rows=2)], "3 pads in the prompt"),
        ([chunk(0, 0, [PAD], rows=0)], "1 pads in the prompt"),
    ],
)
def test_what_does_not_fit_is_refused(chunks: list[EmbeddingChunk], message: str) -> None:
    assembler = PromptAssembler([TextPart([1]), MediaPart(0, "image")], None)
    for good in chunks[:-1]:
        assembler.add(good, b"")
    with pytest.raises(ProtocolError, match=message):
        assembler.add(chunks[-1], b"")


def test_an_item_stands_once_in_a_prompt() -> None:
    with pytest.raises(ProtocolError, match="stands twice"):
        PromptAssembler([MediaPart(0, "image"), MediaPart(0, "image")], None)
