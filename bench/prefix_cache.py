"""`transom bench prefix-cache`: what a multi-user trace hits, ours against a stock engine's retention.

The real cache over nano's real pools, prefill and decode apart, with no model: KV stays empty. Stock means
one window at the end of each prompt and no answers. Counts tokens: every machine gives the same.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.hub import NANO_NAME

EXAMPLES = (
    "transom bench prefix-cache",
    "transom bench prefix-cache --users 32 --memory 1.0 0.5 0.25 --json",
)
CHUNK, PAGE, TURN_END = 512, 16, 1

NEXT_TURN = "next turn of a chat"
SECOND = "second user of a system prompt"
LATER = "later users of a system prompt"
BRANCH_2 = "second request of an unmarked prefix"
BRANCH_3 = "later requests of an unmarked prefix"
CUT = "a long prompt, cut"
FIRST = "first sight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--users", type=int, default=12, metavar="N", help="in the trace (default %(default)s)"
    )
    parser.add_argument(
        "--turns", type=int, default=6, metavar="N", help="of each user (default %(default)s)"
    )
    parser.add_argument(
        "--memory", type=float, nargs="+", default=[1.0, 0.7], metavar="X",
        help="pools, as shares of what holds the whole trace (default 1.0 0.7)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trace (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this JSONL file")


@dataclass(frozen=True)
class _Turn:
    kind: str
    prompt: list[int]
    answer: list[int]


def run(args: argparse.Namespace) -> int:
    if args.users < 2 or args.turns < 1 or not all(0.05 <= share <= 4 for share in args.memory):
        raise ConfigError("--users: at least 2; --turns: at least 1; --memory: from 0.05 to 4")
    turns = list(_trace(args.users, args.turns, random.Random(args.seed)))
    rows = [row for share in args.memory for row in _compare(turns, share)]
    if args.out:
        append_rows(args.out, [origin("prefix-cache") | row for row in rows])
    if args.json:
        write_json(origin("prefix-cache") | {"rows": rows})
        return 0
    table = Table(
        "memory",
        "requests",
        "count",
        "reusable tokens",
        "stock hits",
        "ours",
        title="hits of what is reusable",
    )
    for row in rows:
        shares = (
            f"{row[f'{name}_hit_tokens'] / max(row['reusable_tokens'], 1):.1%}" for name in ("stock", "ours")
        )
        table.add_row(
            f"{row['memory']:g}", row["kind"], str(row["count"]), f"{row['reusable_tokens']:,}", *shares
        )
    make_console().print(table)
    return 0


def _trace(users: int, turns: int, rng: random.Random) -> Iterator[_Turn]:
    """Chats of several users on one system prompt, in turn; a prefix without end mark; a long prompt cut."""

    def text(least: int, most: int) -> list[int]:
        return [rng.randrange(2, 1500) for _ in range(rng.randint(least, most))]

    system, unmarked, long = [*text(700, 700), TURN_END], text(1000, 1000), text(6000, 6000)
    chats = [[*system] for _ in range(users)]
    yield _Turn(FIRST, long, text(50, 50))
    for turn in range(turns):
        for user, chat in enumerate(chats):
            chat += [*text(20, 200), TURN_END]
            answer = text(40, 300)
            kind = NEXT_TURN if turn else (FIRST, SECOND, LATER)[min(user, 2)]
            yield _Turn(kind, list(chat), answer)
            chat += [*answer, TURN_END]
        yield _Turn((FIRST, BRANCH_2, BRANCH_3)[min(turn, 2)], unmarked + text(100, 300), text(20, 60))
        cut = rng.randrange(1500, 5900)
        yield _Turn(CUT, long[:cut] + text(10, 40), text(20, 60))


def _compare(turns: Sequence[_Turn], share: float) -> list[dict[str, Any]]:
    oracle = _reusable(turns)
    tokens = sum(len(turn.prompt) + len(turn.answer) - reusable for turn, reusable in zip(turns, oracle))
    hits = {name: _serve(turns, int(tokens * share), stock=name == "stock") for name in ("stock", "ours")}
    found: dict[str, dict[str, Any]] = {}
    for i, turn in enumerate(turns):
        for kind in (turn.kind, "all"):
            row = found.setdefault(
                kind, {"memory": share, "kind": kind, "count": 0} | dict.fromkeys(_COUNTS, 0)
            )
            row["count"] += 1
            row["prompt_tokens"] += len(turn.prompt)
            row["reusable_tokens"] += oracle[i]
            row["stock_hit_tokens"] += hits["stock"][i]
            row["ours_hit_tokens"] += hits["ours"][i]
    order = [SECOND, LATER, NEXT_TURN, BRANCH_2, BRANCH_3, CUT, "all"]
    return [found[kind] for kind in order if kind in found]


_COUNTS = ("prompt_tokens", "reusable_tokens", "stock_hit_tokens", "ours_hit_tokens")


def _reusable(turns: Sequence[_Turn]) -> list[int]:
    """Return the tokens of each prompt that an unlimited cache of full attention would have, in pages."""
    seen: set[tuple[int, int]] = set()
    lengths = []
    for turn in turns:
        pages = _page_hashes(turn.prompt[:-1])
        lengths.append(next((i for i, page in enumerate(pages) if page not in seen), len(pages)) * PAGE)
        seen.update(_page_hashes([*turn.prompt, *turn.answer[:-1]]))
    return lengths


def _page_hashes(tokens: Sequence[int]) -> list[tuple[int, int]]:
    chained, pages = 0, []
    for end in range(PAGE, len(tokens) + 1, PAGE):
        chained = hash((chained, *tokens[end - PAGE : end]))
        pages.append((end, chained))
    return pages


def _serve(turns: Sequence[_Turn], tokens: int, *, stock: bool) -> list[int]:
    """Return how many tokens of each prompt were cached in pools that hold `tokens` full slots."""
    # Late: help must not wait for torch.
    import torch

    from transom.llm.capacity import PoolPlan
    from transom.llm.plan import find_model
    from transom.llm.pools import DualPools
    from transom.llm.prefix_cache import PrefixCache
    from transom.llm.radix.retention import RetentionPolicy

    config = find_model(NANO_NAME).config
    pages = tokens // PAGE + 2
    # As many SWA pages as plan_pools gives nano at a typical context of 512 tokens: a fifth.
    plan = PoolPlan(PAGE, pages, max(pages // 5, CHUNK // PAGE + 8), 0, 0)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "margin": 2 * PAGE}
    pools, decode = DualPools(config, plan, **kind), DualPools(config, PoolPlan(PAGE, 600, 600, 0, 0), **kind)
    if stock:
        policy = RetentionPolicy(pools.window, PAGE, interval=0, max_extra_tokens=0)
    else:
        policy = RetentionPolicy(pools.window, PAGE, interval=512, max_extra_tokens=plan.swa_tokens // 4)
    cache = PrefixCache(pools, NANO_NAME, (TURN_END,), policy=policy, answers=not stock)
    # What a chunk leaves at its end would be a window too many for stock.
    serve = partial(_serve_one, cache, pools, decode, stores_chunks=not stock)
    hits = [serve(f"r{i}", turn) for i, turn in enumerate(turns)]
    cache.check_integrity()
    return hits


def _serve_one(cache: Any, pools: Any, decode: Any, name: str, turn: _Turn, *, stores_chunks: bool) -> int:
    """Do what prefill, decode and the way back do with a request's pages; return its cached tokens."""
    from transom.llm.request import Request
    from transom.messages import Sampling

    sampling = Sampling(max_tokens=len(turn.answer))
    request = Request(name, sampling, 1e18, 0.0, prompt_ids=turn.prompt, prompt_complete=True, hands_off=True)
    cache.attach(request)
    assert request.kv is not None
    while request.computed < len(turn.prompt):
        end = min(request.computed + CHUNK, len(turn.prompt))
        cache.extend(request.kv, end)
        request.computed = request.kv.length = end
        if stores_chunks or end == len(turn.prompt):
            cache.store(request)
        else:
            cache.slide(request)
    begin = cache.hand_over(request)
    handed = pools.offload(request.kv)
    cache.release(request)
    cache.forget(request)
    if begin is not None:
        kv = decode.adopt(handed)
        stored = len(turn.prompt) + len(turn.answer) - 1  # the last token is never fed in
        decode.extend(kv, stored)
        kv.length = stored
        decode.slide(kv)
        end = stored // PAGE * PAGE
        if end > begin:
            cache.keep_answer(name, turn.answer, decode.copy_out(kv, begin, end))
        decode.release(kv)
    return int(request.cached_tokens)
