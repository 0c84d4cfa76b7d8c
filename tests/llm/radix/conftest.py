"""Simulated pools, a state machine and a small serving loop around the radix tree.

Page contents are modelled as the id of the token prefix they were computed for, so that a page served for
another prefix, or reused while somebody still reads it, shows at the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transom.llm.radix.contract import Lock
from transom.llm.radix.integrity import PoolCounts
from transom.llm.radix.keys import Key, build_key
from transom.llm.radix.retention import RetentionPolicy, Window, complement, plan_retention
from transom.llm.radix.tree import RadixTree

Prefix = tuple[str, tuple[int, ...]]
FREE, TREE = -1, 0
FULL_PAGES, SWA_PAGES = 60, 40
MORE = st.lists(st.integers(0, 1), min_size=1, max_size=16)
SPACES = st.sampled_from(["", "tenant"])


class SimulatedPools:
    """Both pools in pages; SWA page 0 means none. A full page's owner is FREE, TREE or a request."""

    def __init__(self, full_pages: int, swa_pages: int) -> None:
        self.owner = np.full(full_pages, FREE)
        self.full_content = np.full(full_pages, -1)
        self.swa_of = np.zeros(full_pages, np.int64)
        self.swa_content = np.full(swa_pages + 1, -1)
        self.swa_pages = swa_pages
        self.swa_free = set(range(1, swa_pages + 1))
        self.cached: dict[Prefix, int] = {}
        self.where: dict[int, Prefix] = {}
        self.doing = ""

    def swa_mapped(self, pages: Any) -> Any:
        return self.swa_of[pages] != 0

    def move_swa(self, source: Any, target: Any) -> None:
        assert (self.owner[source] == TREE).all()
        assert (self.owner[target] == TREE).all()
        assert (self.swa_of[target] == 0).all(), "healed a live page"
        assert (self.swa_of[source] != 0).all(), "moved what isn't there"
        self.swa_of[target] = self.swa_of[source]
        self.swa_of[source] = 0

    def free_swa(self, pages: Any) -> None:
        assert len(set(pages.tolist())) == len(pages)
        for page in pages.tolist():
            assert self.owner[page] == TREE, "freed another's SWA page"
            assert self.doing != "insert" or page not in self.where, "insert freed a cached window"
            self.drop_swa(page)

    def free_full(self, pages: Any) -> None:
        assert len(set(pages.tolist())) == len(pages)
        for page in pages.tolist():
            assert self.owner[page] == TREE, "freed another's page"
            assert self.swa_of[page] == 0, "SWA page lost with its full page"
            prefix = self.where.pop(page, None)
            if prefix is not None:
                assert self.doing != "insert", "insert freed a cached page"
                del self.cached[prefix]
            self.drop_full(page)

    def drop_swa(self, page: int) -> None:
        swa = int(self.swa_of[page])
        assert swa, "SWA page freed twice"
        self.swa_content[swa] = -1
        self.swa_free.add(swa)
        self.swa_of[page] = 0

    def drop_full(self, page: int) -> None:
        self.owner[page] = FREE
        self.full_content[page] = -1

    @property
    def full_free(self) -> int:
        return int((self.owner == FREE).sum())

    def take(self, count: int, owner: int) -> list[int] | None:
        if self.full_free < count or len(self.swa_free) < count:
            return None
        pages: list[int] = np.flatnonzero(self.owner == FREE)[:count].tolist()
        for page in pages:
            self.owner[page] = owner
            self.swa_of[page] = self.swa_free.pop()
        return pages


@dataclass(eq=False)
class Request:
    name: int
    namespace: str
    tokens: list[int]
    key: Key
    lock: Lock
    table: list[int]
    computed: int
    prompt_len: int
    plan: list[Window] = field(default_factory=list)


class TreeMachine(RuleBasedStateMachine):
    """Requests in all stages of life share a small tree; the rules do what an engine does, in any order."""

    tree_type: type[RadixTree] = RadixTree
    steps = 0

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        window=st.integers(1, 9),
        retain=st.booleans(),
        index_from=st.sampled_from([1, 2, 32]),
    )
    def start(self, page: int, window: int, retain: bool, index_from: int) -> None:
        self.page, self.window = page, window
        self.pools = SimulatedPools(FULL_PAGES, SWA_PAGES)
        self.tree = self.tree_type(self.pools, window=window, page_size=page, index_from=index_from)
        self.policy = RetentionPolicy(
            window, page, interval=4 * page if retain else 0, max_extra_tokens=3 * window
        )
        self.running: list[Request] = []
        self.known: list[list[int]] = [[]]
        self.ids: dict[Prefix, int] = {}
        self.requests = 0

    def content_id(self, namespace: str, tokens: list[int], end: int) -> int:
        return self.ids.setdefault((namespace, tuple(tokens[:end])), len(self.ids))

    def expected_match(self, namespace: str, tokens: list[int], limit: int) -> tuple[int, int, list[int]]:
        pages: list[int] = []
        run = best = 0
        for end in range(self.page, limit + 1, self.page):
            page = self.pools.cached.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
            run = run + self.page if self.pools.swa_of[page] else 0
            if run >= self.window or run == end:
                best = end
        return best, len(pages) * self.page, pages[: best // self.page]

    @rule(base=st.integers(0, 99), cut=st.integers(0, 40), more=MORE, chunk=st.integers(1, 48), space=SPACES)
    def admit(self, base: int, cut: int, more: list[int], chunk: int, space: str) -> None:
        """Admit a prompt that begins like an earlier one, and compute its first chunk."""
        tokens = self.known[base % len(self.known)][:cut] + more
        if len(self.running) < 4:
            self.advance_request(self.begin(tokens, space), chunk, [])

    @rule(base=st.integers(0, 99), cut=st.integers(0, 40), more=MORE, answer=MORE, chunk=st.integers(4, 48))
    def serve(self, base: int, cut: int, more: list[int], answer: list[int], chunk: int) -> None:
        """Run a whole request, handing over each chunk while it runs."""
        request = self.begin(self.known[base % len(self.known)][:cut] + more, "")
        while request in self.running and request.computed < request.prompt_len:
            self.advance_request(request, chunk, [])
            if request in self.running:
                self.hand_over(request)
        if request in self.running:
            self.advance_request(request, 0, answer)
        if request in self.running:
            self.complete(request)

    def begin(self, tokens: list[int], namespace: str) -> Request:
        key = build_key(tokens, namespace=namespace)
        match = self.tree.match(key)
        length, prefix_len, pages = self.expected_match(namespace, tokens, len(tokens) - 1)
        assert match.length < len(tokens), "nothing left to compute"
        assert (match.length, match.prefix_len) == (length, prefix_len)
        assert match.pages.tolist() == pages
        self.known.append(tokens)
        self.requests += 1
        request = Request(
            self.requests, namespace, tokens, key, self.tree.lock(match), pages, length, len(tokens)
        )
        points = [prefix_len] if prefix_len > length else []
        request.plan = plan_retention(self.policy, len(tokens), branch_points=points)
        self.running.append(request)
        return request

    def make_room(self, count: int) -> None:
        short = count - self.pools.full_free
        if short > 0:
            self.evict_full(short * self.page)
        short = count - len(self.pools.swa_free)
        if short > 0:
            self.evict_swa(short * self.page)

    def compute(self, request: Request, upto: int) -> None:
        wanted = -(-upto // self.page) - len(request.table)
        self.make_room(wanted)
        pages = self.pools.take(wanted, request.name)
        if pages is None:
            self.drop(request)
            return
        first = request.computed // self.page
        request.table += pages
        request.computed = upto
        for index in range(first, len(request.table)):
            content = self.content_id(request.namespace, request.tokens, min((index + 1) * self.page, upto))
            page = request.table[index]
            self.pools.full_content[page] = content
            assert self.pools.swa_of[page], "writes where no SWA page is"
            self.pools.swa_content[self.pools.swa_of[page]] = content
        if upto - request.lock.length >= self.window:
            self.tree.release_swa(request.lock)
        self.slide(request)

    def slide(self, request: Request) -> None:
        """Free own SWA pages that are out of the window and not retained."""
        stop = self.policy.window_start(request.computed)
        for low, high in complement(request.plan, request.lock.length, stop):
            for page in request.table[-(-low // self.page) : high // self.page]:
                if self.pools.swa_of[page]:
                    self.pools.drop_swa(page)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), tokens=st.integers(1, 30), more=MORE)
    def advance(self, which: int, tokens: int, more: list[int]) -> None:
        self.advance_request(self.running[which % len(self.running)], tokens, more)

    def advance_request(self, request: Request, tokens: int, more: list[int]) -> None:
        """Compute a chunk of the prompt, or after its end decode some tokens."""
        if request.computed < request.prompt_len:
            self.compute(request, min(request.computed + tokens, request.prompt_len))
        elif more and len(request.tokens) < 60:
            request.tokens = request.tokens + more
            self.known.append(request.tokens)
            request.key = request.key.extended(more)
            self.compute(request, len(request.tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def insert(self, which: int) -> None:
        self.hand_over(self.running[which % len(self.running)])

    def hand_over(self, request: Request) -> None:
        first = request.lock.length // self.page
        last = request.computed // self.page
        own = request.table[first:last]
        live = [bool(self.pools.swa_of[page]) for page in own]
        expected, was_live = [], []
        for index, page in enumerate(own, first):
            assert self.pools.owner[page] == request.name
            self.pools.owner[page] = TREE
            prefix = request.namespace, tuple(request.tokens[: (index + 1) * self.page])
            kept = self.pools.cached.setdefault(prefix, page)
            self.pools.where[kept] = prefix
            expected.append(kept)
            was_live.append(bool(self.pools.swa_of[kept]))
        self.pools.doing = "insert"
        result = self.tree.insert(request.key, np.array(own, np.int64), request.lock, keep=request.plan)
        self.pools.doing = ""
        assert result.length == request.lock.length == last * self.page
        assert result.pages.tolist() == expected
        duplicates = sum(page != kept for page, kept in zip(own, expected))
        assert result.duplicate_tokens == duplicates * self.page
        request.table[first:last] = expected
        for own_live, tree_live, kept in zip(live, was_live, expected):
            assert bool(self.pools.swa_of[kept]) == (own_live or tree_live), "a live window was lost"
        healed = sum(own_live and not tree_live for own_live, tree_live in zip(live, was_live))
        assert result.healed_tokens == healed * self.page
        for page, kept in zip(own, expected):
            assert page == kept or self.pools.owner[page] == FREE, "a duplicate leaked"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        self.complete(self.running[which % len(self.running)])

    def complete(self, request: Request) -> None:
        if request.computed:
            request.plan = plan_retention(self.policy, request.computed, turn_ends=[request.prompt_len])
            self.hand_over(request)
        self.drop(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.drop(self.running[which % len(self.running)])

    def drop(self, request: Request) -> None:
        self.running.remove(request)
        before = dict(self.pools.cached)
        own_from = request.lock.length // self.page
        self.tree.unlock(request.lock)
        gone = before.keys() - self.pools.cached.keys()
        for namespace, tokens in gone:
            for (other, longer), page in self.pools.cached.items():
                assert other != namespace or longer[: len(tokens)] != tokens or not self.pools.swa_of[page]
        for page in request.table[own_from:]:
            assert self.pools.owner[page] == request.name
            if self.pools.swa_of[page]:
                self.pools.drop_swa(page)
            self.pools.drop_full(page)

    @rule(tokens=st.integers(1, 160))
    def evict_full(self, tokens: int) -> None:
        before, evictable = self.pools.full_free, self.tree.full_evictable
        freed = self.tree.evict_full(tokens)
        assert freed == (self.pools.full_free - before) * self.page
        assert freed >= min(tokens, evictable)

    @rule(tokens=st.integers(1, 160))
    def evict_swa(self, tokens: int) -> None:
        before, evictable = len(self.pools.swa_free), self.tree.swa_evictable
        freed = self.tree.evict_swa(tokens)
        assert freed == (len(self.pools.swa_free) - before) * self.page
        assert freed >= min(tokens, evictable)

    @rule(which=st.integers(0, 99), limit=st.integers(0, 60), namespace=SPACES)
    def look(self, which: int, limit: int, namespace: str) -> None:
        """A scheduler's match changes nothing and finds what the dict finds."""
        tokens = self.known[which % len(self.known)]
        match = self.tree.match(build_key(tokens, namespace=namespace), limit)
        length, prefix_len, pages = self.expected_match(namespace, tokens, min(limit, len(tokens)))
        assert (match.length, match.prefix_len, match.pages.tolist()) == (length, prefix_len, pages)

    @invariant()
    def every_reader_reads_its_own(self) -> None:
        type(self).steps += 1
        for request in self.running:
            first_seen = max(request.computed - self.window + 1, 0) // self.page
            for index, page in enumerate(request.table):
                end = min((index + 1) * self.page, request.computed)
                content = self.content_id(request.namespace, request.tokens, end)
                assert self.pools.full_content[page] == content, "full page overwritten"
                if index >= first_seen:
                    swa = self.pools.swa_of[page]
                    assert swa, "hole in a running window"
                    assert self.pools.swa_content[swa] == content, "SWA page overwritten"

    @invariant()
    def nothing_is_lost(self) -> None:
        held = [page for run in self.running for page in run.table[run.lock.length // self.page :]]
        held_swa = sum(bool(self.pools.swa_of[page]) for page in held)
        full = FULL_PAGES, self.pools.full_free, len(held)
        swa = SWA_PAGES, len(self.pools.swa_free), held_swa
        self.tree.check_integrity(
            PoolCounts(*(count * self.page for count in full)),
            PoolCounts(*(count * self.page for count in swa)),
        )

    def teardown(self) -> None:
        if not hasattr(self, "running"):
            return
        for request in list(self.running):
            self.drop(request)
        assert self.tree.full_protected == self.tree.swa_protected == 0
        self.evict_full(FULL_PAGES * self.page)
        assert self.pools.full_free == FULL_PAGES
        assert len(self.pools.swa_free) == SWA_PAGES
        assert not self.tree.roots
        assert not self.pools.cached


class Server:
    """Serves one request after the other through the tree, in chunks of whole pages, as an engine does."""

    def __init__(
        self,
        window: int = 8,
        page: int = 1,
        full_pages: int = 4096,
        swa_pages: int = 1024,
        interval: int = 0,
        max_extra_tokens: int = 4096,
        chunk: int = 1024,
    ) -> None:
        self.page, self.chunk = page, chunk
        self.pools = SimulatedPools(full_pages, swa_pages)
        self.tree = RadixTree(self.pools, window=window, page_size=page)
        self.policy = RetentionPolicy(window, page, interval, max_extra_tokens=max_extra_tokens)

    def serve(
        self, prompt: Sequence[int], answer: Sequence[int] = (), turns: Sequence[int] = (), learn: bool = True
    ) -> int:
        """Compute prompt and answer, cache both, and return how many prompt tokens were reused."""
        match = self.tree.match(build_key(prompt))
        lock = self.tree.lock(match)
        points = [match.prefix_len] if learn and match.prefix_len > match.length else []
        key = build_key([*prompt, *answer])
        plan = plan_retention(self.policy, len(key), turn_ends=turns, branch_points=points)
        computed = match.length
        while computed < len(key):
            computed = min(computed + self.chunk, len(key))
            first = lock.length // self.page
            own = self._take(-(-computed // self.page) - first)
            for low, high in complement(plan, lock.length, self.policy.window_start(computed)):
                for page in own[low // self.page - first : high // self.page - first]:
                    self.pools.drop_swa(page)
            self.tree.insert(key, np.array(own, np.int64), lock, keep=plan)
            for page in own[lock.length // self.page - first :]:
                self.pools.drop_swa(page)
                self.pools.drop_full(page)
        self.tree.unlock(lock)
        self.tree.check_integrity(
            PoolCounts(len(self.pools.owner) * self.page, self.pools.full_free * self.page),
            PoolCounts(self.pools.swa_pages * self.page, len(self.pools.swa_free) * self.page),
        )
        return match.length

    def _take(self, count: int) -> list[int]:
        self.tree.evict_full(max(count - self.pools.full_free, 0) * self.page)
        self.tree.evict_swa(max(count - len(self.pools.swa_free), 0) * self.page)
        pages = self.pools.take(count, TREE)
        assert pages is not None, "everything is pinned"
        return pages


@pytest.fixture
def tree_machine() -> type[TreeMachine]:
    return TreeMachine


@pytest.fixture
def make_server() -> type[Server]:
    return Server
