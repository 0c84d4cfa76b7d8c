"""API keys: their file, their limits and headers, and fairness between them at a real gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import Script, ScriptedFleet
from tests.gateway.gateway_process import gateway_process
from tests.gateway.test_metrics import figures
from transom.errors import ConfigError, RateLimitError
from transom.gateway.api_keys import ApiKey, ApiKeys, KeyLimits
from transom.gateway.quota import Quotas, TokenBucket
from transom.messages import KVHandoff, PrefillJob
from transom.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
NONE = KeyLimits()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as found:
        yield found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_file_gives_names_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# ours\nplain\n\nsmall name=batch requests_per_minute=5 max_inflight=2 weight=0.5\n"
        "free max_inflight=0\n"
    )
    default = KeyLimits(requests_per_minute=60, max_inflight=9)
    found = list(ApiKeys.from_file(str(path), default))
    assert [one.label for one in found] == ["other", "batch", "other"]
    assert [one.limits for one in found] == [default, KeyLimits(5, 2, 0.5), KeyLimits(60, 0)]
    assert [one.number for one in found] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("key secret", "line 1: after the key may come"),
        ("key speed=3", "after the key may come"),
        ("key max_inflight=many", "'many' is not a number"),
        ("key max_inflight=-1", "out of range, allowed 0"),
        ("key weight=nan", "out of range"),
        ("key name=", "must have 1 to 64"),
        ("key\nkey", "line 2: this key stands in an earlier line"),
        ("\n".join(f"k{n} name=n{n}" for n in range(65)), "more than 64 names"),
    ],
)
def test_what_is_wrong_with_a_key_file_is_told_without_the_key(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "file"
    path.write_text(line)
    with pytest.raises(ConfigError) as caught:
        ApiKeys.from_file(str(path), NONE)
    assert words in caught.value.message
    assert "secret" not in caught.value.message


@given(
    limit=st.integers(1, 600), gaps_s=st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=200)
)
def test_a_bucket_never_lets_more_through_than_a_burst_and_the_rate(limit: int, gaps_s: list[float]) -> None:
    bucket = TokenBucket(limit, 0.0)
    now_s, taken = 0.0, 0
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = bucket.take(now_s)
        if wait_s == 0:
            taken += 1
        else:
            assert bucket.left(now_s) == 0
            assert TokenBucket(limit, 0.0).full_in_s(0.0) == 0
            assert 0 < wait_s <= 60 / limit + 1e-9
        assert taken <= limit + now_s * limit / 60 + 1e-6
        assert 0 <= bucket.full_in_s(now_s) <= 60 + 1e-9


def test_a_refused_request_may_come_when_it_was_told_to() -> None:
    now_s = [100.0]
    seen: list[tuple[str, str]] = []
    key = ApiKey(b"", 1, "batch", KeyLimits(requests_per_minute=2, max_inflight=1))
    quotas = Quotas(
        [key],
        count=lambda label, outcome: seen.append((label, outcome)),
        at_once=lambda label, change: None,
        clock=lambda: now_s[0],
    )
    with quotas.hold(key):
        assert quotas.headers(key)["x-ratelimit-remaining-inflight"] == "0"
        with pytest.raises(RateLimitError, match="1 requests of this key are in work"), quotas.hold(key):
            pass
    with quotas.hold(key):
        pass
    with pytest.raises(RateLimitError) as caught, quotas.hold(key):
        pass
    assert caught.value.retry_after_s == pytest.approx(30)
    now_s[0] += caught.value.retry_after_s or 0
    with quotas.hold(key):
        assert quotas.headers(key)["x-ratelimit-remaining-requests"] == "0"
    outcomes = ["admitted", "too_many_at_once", "admitted", "too_many_a_minute", "admitted"]
    assert seen == [("batch", outcome) for outcome in outcomes]


async def test_a_key_that_sends_too_much_is_told_so(
    start_fleet: FleetFactory, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("slow name=slow requests_per_minute=2\nfast\n")
    fleet = await start_fleet(api_keys_file=str(keys))
    for left in ("1", "0"):
        async with http.post(
            fleet.url + CHAT, json=BODY | {"stream": left == "0"}, headers=bearer("slow")
        ) as r:
            assert r.status == 200
            assert r.headers["x-ratelimit-limit-requests"] == "2"
            assert r.headers["x-ratelimit-remaining-requests"] == left
            assert r.headers["x-ratelimit-reset-requests"].endswith("s")
    async with http.post(fleet.url + CHAT, json=BODY, headers=bearer("slow")) as response:
        assert response.status == 429
        assert 1 <= int(response.headers["Retry-After"]) <= 30
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "slow" not in error["message"]
    async with http.get(f"{fleet.url}/v1/models", headers=bearer("slow")) as response:
        assert response.status == 200
        assert "x-ratelimit-limit-requests" not in response.headers
    async with http.post(fleet.url + CHAT, json=BODY, headers=bearer("fast")) as response:
        assert response.status == 200
        assert not any(name.lower().startswith("x-ratelimit") for name in response.headers)


async def test_a_key_may_have_so_many_requests_at_once(
    start_fleet: FleetFactory, http: aiohttp.ClientSession
) -> None:
    fleet = await start_fleet(key_max_inflight=2)
    fleet.script = Script(hold=asyncio.Event())
    running = [asyncio.create_task(http.post(fleet.url + CHAT, json=BODY)) for _ in range(2)]
    await fleet.decodes[0].wait_for(KVHandoff, 2)
    async with http.post(fleet.url + CHAT, json=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert response.headers["x-ratelimit-limit-inflight"] == "2"
        assert response.headers["x-ratelimit-remaining-inflight"] == "0"
    fleet.script.hold.set()  # type: ignore[union-attr]
    assert [(await one).status for one in running] == [200, 200]
    async with http.post(fleet.url + CHAT, json=BODY) as response:
        assert response.status == 200


async def test_keys_are_counted_by_name_and_never_shown(
    start_fleet: FleetFactory, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"secret-{n}\n" for n in range(20)) + "secret-x name=batch max_inflight=1\n")
    fleet = await start_fleet(api_keys_file=str(keys))
    for key in [*(f"secret-{n}" for n in range(20)), "secret-x"]:
        async with http.post(fleet.url + CHAT, json=BODY, headers=bearer(key)) as response:
            assert response.status == 200
    async with http.get(f"{fleet.url}/metrics", headers=bearer("secret-0")) as response:
        text = await response.text()
    assert "secret" not in text
    lines = [line for line in text.splitlines() if line.startswith("transom_key_requests_total")]
    assert sorted(lines) == [
        'transom_key_requests_total{key="batch",outcome="admitted"} 1.0',
        'transom_key_requests_total{key="other",outcome="admitted"} 20.0',
    ]
    assert 'transom_key_requests_in_flight{key="other"} 0.0' in text


async def test_without_keys_all_clients_share_one_limit(
    start_fleet: FleetFactory, http: aiohttp.ClientSession
) -> None:
    fleet = await start_fleet(key_requests_per_minute=1)
    statuses = []
    for _ in range(2):
        async with http.post(f"{fleet.url}/tokenize", json={"prompt": "x"}) as response:
            statuses.append(response.status)
    assert statuses == [200, 429]
    found = await figures(fleet)
    assert found["transom_key_requests_total{key=anybody,outcome=too_many_a_minute}"] == 1


async def test_a_flooding_key_does_not_starve_another(
    tokenizer: Tokenizer, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Four places, forty requests of one key; then each of another's three is next in turn."""
    keys = tmp_path / "keys"
    keys.write_text("flood\nlate\n")
    flags = (
        "--api-keys-file",
        str(keys),
        "--max-inflight",
        "4",
        "--max-wait-s",
        "600",
        "--max-waiting",
        "20",
    )
    async with gateway_process(tokenizer, *flags) as fleet:
        gates: dict[str, asyncio.Event] = {}
        hold_decode(fleet, gates)

        async def ask(key: str) -> int:
            body = {"messages": [{"role": "user", "content": key}]}
            async with http.post(fleet.url + CHAT, json=body, headers=bearer(key)) as response:
                await response.read()
                return response.status

        flood = [asyncio.create_task(ask("flood")) for _ in range(40)]
        await fleet.prefills[0].wait_for(PrefillJob, 4)

        async def until_refused(count: int) -> None:
            while sum(one.done() for one in flood) < count:
                open_ones = [one for one in flood if not one.done()]
                await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)

        await until_refused(16)  # four run, twenty wait
        late = [asyncio.create_task(ask("late")) for _ in range(3)]
        await until_refused(19)  # each of the three has taken the place of one
        order: list[str] = []
        for served in range(4, 12):
            await fleet.decodes[0].wait_for(KVHandoff, served)
            next(gate for gate in gates.values() if not gate.is_set()).set()
            jobs = await fleet.prefills[0].wait_for(PrefillJob, served + 1)
            order.append("late" if "late" in fleet.prompt_text(jobs[-1]) else "flood")
        assert order.count("late") == 3
        assert order.index("late") <= 1
        assert "late" not in order[6:], "each turn of the flood is followed by one of the other key"
        hold_decode(fleet, gates, open=True)
        assert await asyncio.gather(*late) == [200] * 3
        statuses = await asyncio.gather(*flood)
    assert set(statuses) == {200, 429}


def hold_decode(fleet: ScriptedFleet, gates: dict[str, asyncio.Event], *, open: bool = False) -> None:
    """Let each request's decode wait for a gate of its own, or open all gates from now on."""
    if open:
        for gate in gates.values():
            gate.set()
    inner = fleet._decode(fleet.decodes[0])

    async def handle(received: Any) -> None:
        if isinstance(received.message, KVHandoff):
            gate = gates.setdefault(received.message.request_id, asyncio.Event())
            if open:
                gate.set()
            await gate.wait()
        await inner(received)

    fleet.decodes[0].on_message = handle
