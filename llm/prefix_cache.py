"""The prefix cache of an engine: joins requests and pools to the radix tree (engine thread alone).

Says what of a prompt need not be computed, takes over the pages of what was, and evicts when the pools run
short. Knows neither model nor sockets. Requests only ever read the pages that the tree holds.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from transom.errors import RequestError
from transom.llm.answers import Answers
from transom.llm.capacity import pages_for
from transom.llm.pools import DualPools, HostKV, Pages, RequestKV
from transom.llm.radix.contract import NO_PAGES, Lock, Match
from transom.llm.radix.integrity import PoolCounts
from transom.llm.radix.keys import TOKEN_BYTES, Key, build_key, in_blocks, namespace_of
from transom.llm.radix.pins import alone, unpinned
from transom.llm.radix.retention import RetentionPolicy, Window, complement, plan_retention, turn_ends
from transom.llm.radix.tree import RadixTree
from transom.llm.request import Request
from transom.llm.scheduler import Follow, FreePages, RequestView
from transom.llm.sharing import SharedPrefixes

logger = logging.getLogger(__name__)

_FIRST_JUDGED = 256  # requests; then at twice as many each time
_MOSTLY_CUT = 4


@dataclass(slots=True, eq=False)
class _Entry:
    """What the cache knows of a request. `key` is None before it is built and once it can't be."""

    namespace: str
    key: Key | None = None
    key_of: tuple[int, bool] = (0, False)  # the length and completeness of the prompt it was built for
    match: Match | None = None
    lock: Lock | None = None
    turns: list[int] = field(default_factory=list)
    branch_points: list[int] = field(default_factory=list)
    keep: list[Window] = field(default_factory=list)
    counted: int = 0  # positions before this were computed by the request or counted as cached

    @property
    def broken(self) -> bool:
        return self.key is None and self.key_of[0] > 0


class PrefixCache:
    """Give it every request's pages to manage: it attaches, extends, stores and releases them.

    A request may grow: it is matched anew whenever its prompt did, so that text before a picture is computed
    while the picture is encoded, and a picture seen before is found once its embeddings are there.
    """

    def __init__(
        self,
        pools: DualPools,
        model: str,
        turn_end_ids: Sequence[int],
        *,
        policy: RetentionPolicy,
        answers: bool = False,
    ) -> None:
        self.hit_tokens = 0
        self._judged_at = _FIRST_JUDGED
        self._pools = pools
        self._page = pools.page_size
        self._model = model
        self._turn_end_ids = turn_end_ids
        self._tree = RadixTree(pools, window=pools.window, page_size=pools.page_size)
        self._policy = policy
        self._answers = Answers(self._tree, pools, self._policy) if answers else None
        self._entries: dict[Request, _Entry] = {}
        self._followers: frozenset[str] = frozenset()
        self._shared_prefixes = SharedPrefixes()

    @classmethod
    def where_it_fits(
        cls,
        pools: DualPools,
        model: str,
        turn_end_ids: Sequence[int],
        *,
        policy: RetentionPolicy,
        answers: bool,
    ) -> PrefixCache | None:
        """Return a cache, or None (logged) when the SWA pool can't pin a window and compute beside it."""
        least = pages_for(pools.window, pools.page_size) + 2
        if pools.swa_pages.capacity < least:
            logger.warning(
                "prefix cache off: %d SWA pages, at least %d are needed", pools.swa_pages.capacity, least
            )
            return None
        return cls(pools, model, turn_end_ids, policy=policy, answers=answers)

    # What the scheduler sees.

    @property
    def free_pages(self) -> FreePages:
        pools, tree = self._pools, self._tree
        return FreePages(
            pools.full_pages.available + tree.full_evictable // self._page,
            pools.swa_pages.available + tree.swa_evictable // self._page,
        )

    def refine(self, request: Request, view: RequestView) -> RequestView:
        """Return `view` with what the cache holds for the request: pinned already, or to be had."""
        entry = self._entry(request)
        if request.kv is not None:
            if entry.lock is None:
                return view
            full, swa = alone(entry.lock)
            own = request.kv.count - request.kv.shared + full // self._page
            return replace(
                view,
                full_pages=own,
                swa_pages=view.swa_pages + swa // self._page,
                shared_pages=request.kv.count - own,
            )
        match = None if request.host_kv is not None else self._match(request, entry)
        if match is None or not match.length:
            return view
        full, swa = unpinned(match)
        return replace(
            view,
            stored_len=match.length,
            ready_len=request.ready_from(match.length),
            full_pages=full // self._page,
            swa_pages=swa // self._page,
            shared_pages=(match.length - full) // self._page,
        )

    def prepare(self, request: Request) -> None:
        """Build the key of a prompt, which takes a while if it is long, before it is asked for."""
        self._key(request, self._entry(request))

    def guess(self, request: Request) -> int:
        """Return how many tokens of a waiting request were stored or cached when it was last looked at."""
        if request.host_kv is not None:
            return request.computed
        entry = self._entry(request)
        if entry.match is None or entry.key_of != _state(request):
            self._match(request, entry)
        return entry.match.length if entry.match is not None else 0

    def shares(self, requests: Sequence[Request]) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return for each prompt which others begin alike, with the tokens it could take over from them."""
        alike: dict[tuple[str, bytes], list[tuple[str, Key]]] = defaultdict(list)
        for request in requests:
            entry = self._entry(request)
            if request.host_kv is None and (key := self._key(request, entry)) is not None:
                first_page = key.raw[: self._page * TOKEN_BYTES]
                alike[entry.namespace, first_page].append((request.request_id, key))
        return self._shared_prefixes.among(alike.values(), self._page)

    def follow(self, follows: Mapping[str, Follow], requests: Mapping[str, Request]) -> None:
        """See to it that the leaders keep a window where their followers will start."""
        self._followers = frozenset(follows)
        for follow in follows.values():
            entry = self._entries[requests[follow.leader]]
            if follow.tokens not in entry.branch_points and entry.key is not None:
                entry.branch_points.append(follow.tokens)
                self._plan(entry, len(entry.key))

    # The life of a request's pages.

    def attach(self, request: Request) -> None:
        """Give a request without KV the longest cached prefix as its first pages."""
        entry = self._entry(request)
        match = self._match(request, entry)
        if match is None:
            request.kv = RequestKV()
        else:
            self._start_from(request, entry, match)

    def catch_up(self, request: Request) -> None:
        """Let a running prompt that has grown, or followed another, skip what is cached meanwhile."""
        entry = self._entry(request)
        news = entry.key_of != _state(request) or request.request_id in self._followers
        if request.kv is None or entry.lock is None or entry.broken or not news:
            return
        match = self._match(request, entry)
        if match is None or match.length <= request.computed:
            return
        old_kv, old_lock = request.kv, entry.lock
        self._start_from(request, entry, match)
        self._tree.unlock(old_lock)
        self._pools.release(old_kv)

    def make_room(self, full: int, swa: int) -> None:
        """Evict until so many pages are free, as far as there is anything to evict."""
        short = full - self._pools.full_pages.available
        if short > 0:
            self._tree.evict_full(short * self._page)
        short = swa - self._pools.swa_pages.available
        if short > 0:
            self._tree.evict_swa(short * self._page)

    def extend(self, kv: RequestKV, length: int) -> None:
        """As DualPools.extend, evicting for it."""
        wanted = pages_for(length, self._page) - kv.count
        self.make_room(wanted, wanted)
        self._pools.extend(kv, length)

    def store(self, request: Request) -> None:
        """Free SWA pages behind the window, and take over whole pages of the prompt for others to use."""
        entry = self._entry(request)
        entry.counted = max(entry.counted, request.computed)
        self.slide(request)
        if entry.key is not None:
            self._insert(request, entry, entry.key)

    def finish(self, request: Request) -> None:
        """Take over what was generated, as far as its KV is stored."""
        entry = self._entry(request)
        prompt_len = len(request.prompt_ids)
        if entry.key is None or entry.lock is None or request.computed <= prompt_len:
            return
        key = entry.key.extended(request.output_ids[: request.computed - prompt_len])
        ends = [end for end in entry.turns if end < prompt_len]
        entry.keep = plan_retention(self._policy, request.computed, turn_ends=[*ends, prompt_len])
        self.slide(request)
        self._insert(request, entry, key)

    def hand_over(self, request: Request) -> int | None:
        """Return from where on the KV of the answer is wanted back; None if it isn't."""
        key = self._entry(request).key
        if self._answers is None or key is None:
            return None
        return self._answers.expect(request.request_id, key)

    def keep_answer(self, request_id: str, output_ids: Sequence[int], host: HostKV) -> None:
        """Take over the KV of an answer, if that of its prompt is still here."""
        if self._answers is not None:
            self._answers.take(request_id, output_ids, host, self.make_room)

    def slide(self, request: Request) -> None:
        """Free the request's own SWA pages that neither it nor a later request at its end will read."""
        kv, entry = request.kv, self._entry(request)
        assert kv is not None
        if entry.lock is None:
            self._pools.slide(kv)
            return
        begin = max(kv.swa_from, kv.shared) * self._page
        stop = self._policy.window_start(kv.length)
        for low, high in complement(entry.keep if entry.key is not None else (), begin, stop):
            self._pools.free_swa(kv.pages[low // self._page : high // self._page])
        kv.swa_from = max(kv.swa_from, stop // self._page)
        if kv.length - entry.lock.length >= self._pools.window:
            self._tree.release_swa(entry.lock)

    def release(self, request: Request) -> None:
        """Take the request's pages; what the tree holds stays there for others."""
        assert request.kv is not None
        entry = self._entry(request)
        if entry.lock is not None:
            self._tree.unlock(entry.lock)
            entry.lock = None
        self._pools.release(request.kv)

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that holds no pages."""
        entry = self._entries.pop(request, None)
        assert entry is None or entry.lock is None, "forgotten with a lock"

    # Figures and checks.

    def figures(self) -> dict[str, float]:
        tree = self._tree
        return {
            "cache_tokens": tree.full_evictable + tree.full_protected,
            "cache_evictable_tokens": tree.full_evictable,
            "cache_hit_tokens": self.hit_tokens,
            "cache_cut_tokens": tree.stats.swa_cut_tokens,
            "cache_answer_tokens": self._answers.tokens if self._answers else 0,
        }

    def check_integrity(self, owners: Iterable[RequestKV] = ()) -> None:
        """Assert that free, cached and the owners' pages are all there is, and that the tree is sound."""
        owners = list(owners)
        pools, page = self._pools, self._page
        pools.check_integrity(owners, self._cached_pages())
        full, swa = pools.full_pages, pools.swa_pages
        held = sum(kv.count - kv.shared for kv in owners)
        held_swa = sum(kv.swa_count for kv in owners)
        self._tree.check_integrity(
            PoolCounts(full.capacity * page, full.available * page, held * page),
            PoolCounts(swa.capacity * page, swa.available * page, held_swa * page),
        )

    def _cached_pages(self) -> Pages:
        pages: list[Pages] = [NO_PAGES]
        nodes = list(self._tree.roots.values())
        while nodes:
            node = nodes.pop()
            pages.append(node.pages)
            nodes.extend(node.children.values())
        return np.concatenate(pages)

    # Inside.

    def _entry(self, request: Request) -> _Entry:
        entry = self._entries.get(request)
        if entry is None:
            namespace = namespace_of(self._model, request.cache_salt)
            entry = self._entries[request] = _Entry(namespace)
        return entry

    def _match(self, request: Request, entry: _Entry) -> Match | None:
        """Return the longest cached prefix of what is known of the prompt; None if it can't be cached."""
        key = self._key(request, entry)
        if key is None:
            return None
        if entry.match is None or entry.match.epoch != self._tree.store.epoch:
            # All but the last token, which must be computed as the first output comes from it.
            entry.match = self._tree.match(key)
        return entry.match

    def _key(self, request: Request, entry: _Entry) -> Key | None:
        """Return the key of what is known of the prompt; None if it can't be cached."""
        state = _state(request)
        if entry.key_of != state and not entry.broken:
            self._build_key(request, entry)
            entry.key_of, entry.match = state, None
        return entry.key

    def _build_key(self, request: Request, entry: _Entry) -> None:
        ids = np.array(request.prompt_ids, np.int64)
        try:
            entry.key = build_key(ids, in_blocks(request.media_spans), entry.namespace)
        except RequestError as error:
            logger.info("request %s is not cached: %s", request.request_id, error.message)
            entry.key = None
            return
        ends = {end for token in self._turn_end_ids for end in turn_ends(ids, token)}
        entry.turns = sorted(ends)
        self._plan(entry, len(ids))

    def _plan(self, entry: _Entry, length: int) -> None:
        entry.keep = plan_retention(
            self._policy, length, turn_ends=entry.turns, branch_points=entry.branch_points
        )

    def _start_from(self, request: Request, entry: _Entry, match: Match) -> None:
        assert entry.key is not None
        pages = match.pages.copy()  # before the lock, which may split the nodes of the match
        if match.prefix_len > match.length and match.prefix_len not in entry.branch_points:
            entry.branch_points.append(match.prefix_len)
            self._plan(entry, len(entry.key))
        entry.lock = self._tree.lock(match)
        self._judge_hits()
        count = len(pages)
        request.kv = RequestKV(pages, count, count, match.window_start // self._page, match.length)
        hit = max(match.length - max(request.computed, entry.counted), 0)
        entry.counted = max(entry.counted, match.length)
        request.cached_tokens += hit
        self.hit_tokens += hit
        request.computed = match.length

    def _judge_hits(self) -> None:
        """Warn when windows are missing for most of what is cached: nothing else would tell."""
        stats = self._tree.stats
        if stats.lookups < self._judged_at:
            return
        self._judged_at = 2 * stats.lookups
        if stats.swa_cut_tokens > _MOSTLY_CUT * stats.hit_tokens:
            logger.warning(
                "prefix cache: %d tokens of %d requests were hits, %d more were cached but for their window:"
                " the SWA pool is too small for these prompts, see typical_context_len",
                stats.hit_tokens,
                stats.lookups,
                stats.swa_cut_tokens,
            )

    def _insert(self, request: Request, entry: _Entry, key: Key) -> None:
        kv, lock = request.kv, entry.lock
        assert kv is not None
        if lock is None or kv.length // self._page <= kv.shared:
            return
        first = kv.shared
        result = self._tree.insert(key, kv.pages[first : kv.length // self._page], lock, keep=entry.keep)
        kv.shared = result.length // self._page
        # The tree may have had some of them already, and has freed ours then.
        kv.pages[first : kv.shared] = result.pages


def _state(request: Request) -> tuple[int, bool]:
    return len(request.prompt_ids), request.prompt_complete
