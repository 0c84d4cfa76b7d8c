"""Answers in the prefix cache: KV that decode workers computed joins that of its prompt (engine thread).

A prompt's key is remembered while another worker decodes; what comes back then is inserted behind it. Knows
no requests and no sockets.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

from transom.llm.pools import DualPools, HostKV, PoolExhaustedError, RequestKV
from transom.llm.radix.contract import Lock
from transom.llm.radix.keys import Key
from transom.llm.radix.retention import RetentionPolicy, plan_retention
from transom.llm.radix.tree import RadixTree

logger = logging.getLogger(__name__)

_MAX_KEY_TOKENS = 4_000_000  # 32 MB


class Answers:
    """Prompts handed to decode workers, and `tokens` of answers taken into the tree so far."""

    def __init__(self, tree: RadixTree, pools: DualPools, policy: RetentionPolicy) -> None:
        self.tokens = 0
        self._tree = tree
        self._pools = pools
        self._policy = policy
        self._page = pools.page_size
        self._expected: OrderedDict[str, Key] = OrderedDict()
        self._expected_tokens = 0

    def expect(self, request_id: str, key: Key) -> int:
        """Remember a prompt, the oldest giving way; return the position from which KV is wanted."""
        self._expected[request_id] = key
        self._expected_tokens += len(key)
        while self._expected_tokens > _MAX_KEY_TOKENS:
            self._expected_tokens -= len(self._expected.popitem(last=False)[1])
        return self._whole_pages(key)

    def take(
        self,
        request_id: str,
        output_ids: Sequence[int],
        host: HostKV,
        make_room: Callable[[int, int], None],
    ) -> None:
        """Insert an answer behind its prompt, if that is in the tree still; else drop it."""
        key = self._expected.pop(request_id, None)
        if key is None:
            return
        self._expected_tokens -= len(key)
        begin, end = host.begin, host.length
        if begin != self._whole_pages(key) or end % self._page or end > len(key) + len(output_ids):
            logger.warning("the answer of %s, %d to %d, does not fit its prompt", request_id, begin, end)
            return
        if not host.finite:
            logger.warning("the answer of %s is not cached: its KV is not finite", request_id)
            return
        key = key.extended(output_ids[: end - len(key)])
        match = self._tree.match(key, end)
        if match.prefix_len < begin or match.length == end:
            return
        count = len(match.pages)
        kv = RequestKV(match.pages.copy(), count, count, length=match.length)
        lock = self._tree.lock(match)
        make_room(end // self._page - count, end // self._page - count)
        # Making room may have evicted what lies between the lock and the answer.
        if self._tree.match(key, end).prefix_len >= begin:
            with suppress(PoolExhaustedError):
                self._insert(key, kv, lock, host)
        self._tree.unlock(lock)

    def _insert(self, key: Key, kv: RequestKV, lock: Lock, host: HostKV) -> None:
        """Fill new pages from the lock on. Those in front of the answer are duplicates, which the tree frees.

        The prompt's last window may have become a tombstone there: it heals by what came back.
        """
        first_live = -(-(host.length - host.swa_len) // self._page) * self._page
        keep = plan_retention(self._policy, host.length)
        known = self._tree.match(key, host.length).prefix_len
        self._pools.take_in(kv, host, max(first_live, keep[0].start))
        self._tree.insert(key, kv.pages[kv.shared : kv.count], lock, keep=keep)
        self.tokens += host.length - max(host.begin, known)

    def _whole_pages(self, key: Key) -> int:
        return len(key) // self._page * self._page
