"""Keys: media ids carry the whole content key and the position; namespaces and malformed spans stay apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.errors import RequestError
from transom.llm.radix.keys import build_key, namespace_of, shared_len

PROMPT = [1, 2, 9, 9, 9, 9, 3]


def test_media_ids_lie_outside_of_the_vocabulary_and_differ_by_position_and_item() -> None:
    first = build_key(PROMPT, [(2, 4, "aa" * 16)]).tokens
    second = build_key(PROMPT, [(2, 4, "aa" * 15 + "ab")]).tokens

    assert first[[0, 1, 6]].tolist() == [1, 2, 3]
    media = [*first[2:6].tolist(), *second[2:6].tolist()]
    assert max(media) < 0
    assert len({value & 0xFFFF for value in media}) > 4, "low bits alone should differ as well"
    assert len(set(media)) == 8


def test_same_item_gives_the_same_ids_and_another_item_shares_only_the_text_before() -> None:
    key = build_key(PROMPT, [(2, 4, "item-a")])
    assert build_key(np.array(PROMPT, np.int32), [(2, 4, "item-a")]) == key
    assert shared_len(key, build_key(PROMPT, [(2, 4, "item-b")])) == 2
    assert shared_len(key, build_key(PROMPT)) == 2


def test_an_item_in_several_spans_goes_on_where_the_last_span_ended() -> None:
    split = build_key([9, 9, 5, 9, 9], [(3, 2, "clip"), (0, 2, "clip")]).tokens
    whole = build_key([9, 9, 9, 9], [(0, 4, "clip")]).tokens
    assert split[[0, 1, 3, 4]].tolist() == whole.tolist()


@pytest.mark.parametrize(
    "spans",
    [
        [(-1, 2, "a")],
        [(0, 0, "a")],
        [(6, 2, "a")],
        [(0, 3, "a"), (2, 2, "b")],
        [(2, 4, "")],
    ],
)
def test_malformed_spans_are_refused_rather_than_cached_as_placeholders(
    spans: list[tuple[int, int, str]],
) -> None:
    with pytest.raises(RequestError, match="media span"):
        build_key(PROMPT, spans)


def test_token_ids_that_could_pass_for_media_are_refused() -> None:
    with pytest.raises(RequestError, match="-5 is negative"):
        build_key([1, -5])
    with pytest.raises(TypeError, match="integers"):
        build_key([1.5])


def test_namespaces_are_framed_and_share_nothing() -> None:
    names = {
        namespace_of("m"),
        namespace_of("m", "a"),
        namespace_of("ma"),
        namespace_of("m", "ab"),
        namespace_of("ma", "b"),
    }
    assert len(names) == 5
    assert shared_len(build_key([1, 2], namespace="x"), build_key([1, 2], namespace="y")) == 0


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_shared_len_is_the_common_prefix(first: list[int], second: list[int]) -> None:
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    assert shared_len(build_key(first), build_key(second)) == common
    assert build_key(first).extended(second) == build_key([*first, *second])
