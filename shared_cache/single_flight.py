"""Wait for an entry that another process is making, without blocking the event loop.

Encoder process, event loop. Knows only the contract of an embedding cache.
"""

from __future__ import annotations

import asyncio

from transom.shared_cache.contract import DEFAULT_CLAIM_S, Busy, Claim, EmbeddingCache, Lease

_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.05


async def lease_or_claim(cache: EmbeddingCache, key: str, *, ttl_s: float = DEFAULT_CLAIM_S) -> Lease | Claim:
    """Return the entry, or the claim to make it once nobody else has one.

    Waits while another process makes the entry; ends early if that process dies, gives up or is
    overdue. A claim that a cancelled call would have got ends by itself.
    """
    poll_s = _FIRST_POLL_S
    while True:
        found = await asyncio.to_thread(cache.begin, key, ttl_s=ttl_s)
        if not isinstance(found, Busy):
            return found
        await asyncio.sleep(min(poll_s, max(found.expires_s, 0.0)))
        poll_s = min(2 * poll_s, _LAST_POLL_S)
