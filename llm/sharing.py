"""Which of the prompts in work begin alike: what one computes, the others need not (engine thread).

Compares keys and nothing else; who follows whom is for transom.llm.scheduler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from transom.llm.radix.keys import Key, shared_len


class SharedPrefixes:
    """Remembers comparisons from step to step, as long as both prompts are there and do not grow."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Key, Key, int]] = {}

    def among(
        self, groups: Iterable[Sequence[tuple[str, Key]]], page_size: int
    ) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return for each prompt the others of its group with the tokens that it could take over from them.

        Those are whole pages, and never the last token of the prompt that takes over.
        """
        known, self._known = self._known, {}
        found: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for group in groups:
            for (one, one_key), (other, other_key) in combinations(group, 2):
                memo = known.get((one, other))
                if memo is None or memo[0] is not one_key or memo[1] is not other_key:
                    memo = one_key, other_key, shared_len(one_key, other_key)
                self._known[one, other] = memo
                for name, key, of in ((one, one_key, other), (other, other_key, one)):
                    found[name].append((of, min(memo[2], len(key) - 1) // page_size * page_size))
        return {name: tuple(shared) for name, shared in found.items()}
