"""The gateway's own state machines, driven without sockets."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transom.errors import ErrorInfo, MediaError, OverloadedError, StageLostError, UnavailableError
from transom.gateway.exchange import Attachment, Dispatcher, Plan, spread_seed
from transom.gateway.fleet import Fleet, StageName
from transom.gateway.media_totals import MediaLimits, MediaTotals
from transom.gateway.prompt import Prompt
from transom.gateway.requests import LiveRequest, RequestTable, Work
from transom.gateway.router import Candidate, choose
from transom.gateway.schema import MediaItem
from transom.messages import (
    Abort,
    EncodeDone,
    ItemSize,
    Join,
    MediaSize,
    Message,
    Modality,
    Ping,
    Pong,
    PrefillJob,
    RequestFailed,
    Sampling,
    TextPart,
    TokenChunk,
)
from transom.transport import Frame, Transport


class Wire:
    """Stands where the transport stands and keeps what is sent."""

    address = "tcp://gateway"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.full: set[str] = set()

    def send(self, address: str, message: Message, frames: Sequence[Frame] = ()) -> None:
        if address in self.full:
            raise OverloadedError("full", retry_after_s=1)
        self.sent.append((address, message))

    def aborts(self) -> list[tuple[str, str]]:
        return [(address, one.request_id) for address, one in self.sent if isinstance(one, Abort)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ADDRESSES: dict[StageName, tuple[str, ...]] = {
    "encoder": ("tcp://e0", "tcp://e1"),
    "prefill": ("tcp://p0", "tcp://p1"),
    "decode": ("tcp://d0", "tcp://d1"),
}


def make_fleet(wire: Wire, clock: Clock, lost: list[tuple[str, str]], **changes: Any) -> Fleet:
    return Fleet(
        cast(Transport, wire),
        ADDRESSES,
        on_lost=lambda address, stage, why, gone: lost.append((address, why)),
        ping_interval_s=0.5,
        worker_timeout_s=10,
        clock=clock,
        rng=random.Random(1),
        **changes,
    )


def pong(
    stage: str,
    incarnation: str = "one",
    *,
    nonce: int = 0,
    ready: bool = True,
    breaks: int = 0,
    **load: float,
) -> Pong:
    return Pong(nonce=nonce, stage=stage, incarnation=incarnation, ready=ready, load=load, breaks=breaks)


def pass_time(fleet: Fleet, clock: Clock, seconds: float, heard: str = "") -> None:
    """Let the gateway tick as it does; of a worker that is heard some message comes each time."""
    for _ in range(int(seconds / 0.5)):
        clock.now += 0.5
        fleet.heard(heard)
        fleet.tick()


def wake_all(fleet: Fleet) -> None:
    for worker in fleet.workers():
        fleet.pong(worker.address, pong(worker.stage))


def test_equal_workers_share_the_work() -> None:
    rng = random.Random(7)
    counts: dict[str | None, int] = {}
    for _ in range(400):
        picked = choose([Candidate(f"w{n}", 0, 0.0, 0.0) for n in range(4)], rng)
        counts[picked] = counts.get(picked, 0) + 1
    assert all(count < 160 for count in counts.values())
    assert len(counts) == 4


def test_the_least_loaded_worker_is_chosen_and_ties_go_to_the_one_that_waited() -> None:
    rng = random.Random(7)
    assert choose([Candidate("a", 50, 0, 0), Candidate("b", 40, 0, 9)], rng) == "b"
    assert choose([Candidate("a", 0, 90, 0), Candidate("b", 40, 0, 9)], rng) == "b"
    assert choose([Candidate("a", 5, 5, 2), Candidate("b", 5, 5, 1)], rng) == "b"
    assert choose([], rng) is None


def test_a_fleet_is_ready_when_each_stage_has_a_ready_worker() -> None:
    fleet = make_fleet(Wire(), Clock(), [])
    assert fleet.missing() == ["encoder", "prefill", "decode"]
    fleet.pong("tcp://e0", pong("encoder"))
    fleet.pong("tcp://p0", pong("prefill", ready=False))
    fleet.pong("tcp://d0", pong("decode"))
    assert fleet.missing() == ["prefill"]
    with pytest.raises(UnavailableError, match="no prefill worker"):
        fleet.choose("prefill")


def test_an_encoder_that_joins_takes_its_share_and_leaves_no_trace_when_it_is_gone() -> None:
    clock, lost = Clock(), list[tuple[str, str]]()
    wire = Wire()
    fleet = make_fleet(wire, clock, lost)
    wake_all(fleet)
    keys = [f"key-{n}" for n in range(300)]
    before = {key: fleet.choose_encoder(key) for key in keys}
    fleet.join(Join(address="tcp://e9"))
    assert {key: fleet.choose_encoder(key) for key in keys} == before  # it has not answered yet
    fleet.tick()
    assert ("tcp://e9", Ping) in [(address, type(one)) for address, one in wire.sent]
    fleet.pong("tcp://e9", pong("encoder", ranks=2.0))
    after = {key: fleet.choose_encoder(key) for key in keys}
    moved = {key for key in keys if after[key] != before[key]}
    assert {after[key] for key in moved} == {"tcp://e9"}
    assert 0.35 < len(moved) / len(keys) < 0.65  # two ranks of four
    assert fleet.name("tcp://e9") == "encoder-2"
    fleet.take("tcp://e9", 10)
    fleet.join(Join(address="tcp://e9", leaving=True))
    assert {key: fleet.choose_encoder(key) for key in keys} == before
    assert lost == []  # what it has in work it still finishes
    pass_time(fleet, clock, 100)
    assert "tcp://e9" in [one.address for one in fleet.workers()]
    fleet.release("tcp://e9", 10)
    fleet.tick()
    assert "tcp://e9" not in [one.address for one in fleet.workers()]
    assert fleet.name("tcp://e9") == "encoder"
    fleet.check_integrity()


def test_joining_encoders_are_bounded_and_configured_ones_keep_their_place() -> None:
    fleet = make_fleet(Wire(), Clock(), [])
    wake_all(fleet)
    fleet.join(Join(address="tcp://e0", leaving=True))
    fleet.join(Join(address="tcp://p0"))
    assert [one.address for one in fleet.ready("encoder")] == list(ADDRESSES["encoder"])
    for number in range(400):
        fleet.join(Join(address=f"tcp://many{number}"))
    assert len(fleet.workers("encoder")) == 256
    assert len({fleet.name(one.address) for one in fleet.workers("encoder")}) == 256


def test_a_text_model_needs_no_encoder() -> None:
    fleet = make_fleet(Wire(), Clock(), [], needed=("prefill", "decode"))
    fleet.pong("tcp://p0", pong("prefill"))
    assert fleet.missing() == ["decode"]
    fleet.pong("tcp://d0", pong("decode"))
    assert fleet.missing() == []


def test_the_age_of_figures_counts_since_they_were_asked_for() -> None:
    wire, clock = Wire(), Clock()
    fleet = make_fleet(wire, clock, [])
    prefill, other = fleet["tcp://p0"], fleet["tcp://p1"]
    assert fleet.age_s(prefill) is None
    for _ in range(3):
        fleet.tick()
        clock.now += 0.5
    asked = [one.nonce for address, one in wire.sent if isinstance(one, Ping) and address == "tcp://p0"]
    fleet.pong("tcp://p0", pong("prefill", nonce=asked[0]))
    assert fleet.age_s(prefill) == 1.5
    fleet.pong("tcp://p0", pong("prefill", nonce=asked[2]))
    assert fleet.age_s(prefill) == 0.5
    fleet.heard("tcp://p0")  # a sign of life, but no figures
    fleet.pong("tcp://p0", pong("prefill", nonce=asked[1]))  # its question is forgotten: they may be older
    fleet.lost("tcp://p0", "gone")
    clock.now += 4
    assert fleet.age_s(prefill) == 4.5
    assert fleet.age_s(other) is None
    for _ in range(1000):  # one that never answers is asked all the same
        fleet.tick()
    assert len(other.asked) < 300


def test_a_worker_that_took_the_gateway_for_lost_has_dropped_its_requests() -> None:
    lost: list[tuple[str, str]] = []
    fleet = make_fleet(Wire(), Clock(), lost)

    def tell(breaks: int, incarnation: str = "one") -> list[tuple[str, str]]:
        lost.clear()
        fleet.pong("tcp://p0", pong("prefill", incarnation, breaks=breaks))
        return list(lost)

    broke = [("tcp://p0", "its connection to the gateway ended")]
    assert tell(3) == []  # from the time of another gateway at this address
    assert tell(3) == []
    assert tell(4) == broke
    assert fleet["tcp://p0"].ready
    assert tell(4) == []
    assert tell(0) == []  # it forgets in time
    assert tell(2) == broke
    assert tell(0, "two") == [("tcp://p0", "it was restarted")]
    assert tell(1, "two") == broke
    fleet.lost("tcp://p0", "gone")
    assert tell(9, "two") == []  # its requests were given up before


def test_a_worker_under_another_name_is_known_by_its_nonce() -> None:
    wire, clock = Wire(), Clock()
    fleet = make_fleet(wire, clock, [])
    fleet.tick()
    nonce = next(one.nonce for address, one in wire.sent if isinstance(one, Ping) and address == "tcp://d1")
    fleet.pong("tcp://127.0.0.1:5", pong("decode", nonce=nonce))
    assert fleet["tcp://d1"].peer == "tcp://127.0.0.1:5"
    fleet.pong("tcp://127.0.0.1:5", pong("decode", nonce=-5, ready=False))
    assert not fleet["tcp://d1"].ready


def test_a_worker_of_the_wrong_stage_is_not_used() -> None:
    fleet = make_fleet(Wire(), Clock(), [])
    fleet.pong("tcp://p0", pong("decode"))
    assert not fleet["tcp://p0"].ready


def test_a_loss_is_told_once() -> None:
    clock, lost = Clock(), list[tuple[str, str]]()
    fleet = make_fleet(Wire(), clock, lost)
    fleet.lost("tcp://p0", "connection refused")  # it never was there
    assert lost == []
    wake_all(fleet)
    fleet.lost("tcp://p0", "closed")
    fleet.lost("tcp://p0", "closed")
    clock.now += 11
    fleet.pong("tcp://d0", pong("decode"))
    fleet.tick()
    fleet.tick()
    assert [address for address, _ in lost] == ["tcp://p0", "tcp://e0", "tcp://e1", "tcp://p1", "tcp://d1"]
    fleet.pong("tcp://d0", pong("decode", "two"))
    assert lost[-1] == ("tcp://d0", "it was restarted")
    assert fleet["tcp://d0"].ready


def test_a_worker_that_is_heard_is_not_silent() -> None:
    """Its pong may wait behind many other messages, at a gateway that is busy with them."""
    clock, lost = Clock(), list[tuple[str, str]]()
    fleet = make_fleet(Wire(), clock, lost)
    wake_all(fleet)
    pass_time(fleet, clock, 10.5, heard="tcp://d0")
    assert "tcp://d0" not in [address for address, _ in lost]
    assert "tcp://d1" in [address for address, _ in lost]
    pass_time(fleet, clock, 10.5, heard="tcp://stranger")
    assert lost[-1] == ("tcp://d0", "it has not answered for 10 s")


def test_a_gateway_that_stood_still_blames_nobody() -> None:
    """What the workers said meanwhile lies in its inbox; those that are silent afterwards are lost."""
    clock, lost = Clock(), list[tuple[str, str]]()
    fleet = make_fleet(Wire(), clock, lost)
    fleet.tick()
    wake_all(fleet)
    for _ in range(3):
        clock.now += 40
        fleet.tick()
    assert lost == []
    pass_time(fleet, clock, 10.5, heard="tcp://d0")
    assert sorted(address for address, _ in lost) == [
        "tcp://d1",
        "tcp://e0",
        "tcp://e1",
        "tcp://p0",
        "tcp://p1",
    ]


def test_media_stay_with_their_encoder_unless_it_is_overloaded_or_gone() -> None:
    fleet = make_fleet(Wire(), Clock(), [])
    wake_all(fleet)
    owner = fleet.choose_encoder("some key")
    assert {fleet.choose_encoder("some key") for _ in range(5)} == {owner}
    for _ in range(8):
        fleet.take(owner, 1)
    other = fleet.choose_encoder("some key")
    assert other != owner
    fleet.lost(other, "closed")
    assert fleet.choose_encoder("some key") == owner


def live(wake: list[int], released: list[str]) -> LiveRequest:
    return LiveRequest(
        request_id="r",
        prefill=Work("p", "prefill", 10),
        decode=Work("d", "decode", 20),
        encoders={0: Work("e", "encoder", 5)},
        wake=lambda: wake.append(1),
        release=lambda address, tokens: released.append(address),
    )


def chunk(index: int, count: int = 1, **more: Any) -> TokenChunk:
    return TokenChunk(request_id="r", index=index, token_ids=list(range(index, index + count)), **more)


ENCODED = EncodeDone(request_id="r", item_index=0, modality="image", content_key="", media_tokens=1)


def encoded(released: list[str] | None = None) -> LiveRequest:
    """Return a request whose one item is with prefill."""
    request = live([], [] if released is None else released)
    request.on_encode_done(ENCODED)
    return request


LIMITS = MediaLimits(pixels=1000, video_s=60.0, audio_s=90.0, visual_tokens=100)
PARAMS = ("first", "second", "third")


def with_items(limits: MediaLimits = LIMITS) -> LiveRequest:
    request = live([], [])
    request.encoders = {number: Work(f"e{number}", "encoder", 5) for number in range(3)}
    request.totals = MediaTotals(limits, PARAMS)
    return request


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (({"pixels": 500}, {"pixels": 500}, {"pixels": 1}), "1001 pixels, at most 1000"),
        (({"video_s": 20.0}, {"video_s": 40.0}, {"video_s": 1.0}), "60.5 s of video, at most 60"),
        (({"audio_s": 40.0}, {"audio_s": 50.0}, {"audio_s": 2.0}), "91 s of sound, at most 90"),
        (({"audio_s": 40.0}, {"audio_s": 50.0}, {"audio_s": 0.04}), "90.02 s of sound, at most 90"),
        (
            ({"visual_tokens": 99}, {"visual_tokens": 1}, {"visual_tokens": 1}),
            "101 visual tokens, at most 100",
        ),
    ],
)
def test_the_item_that_passes_a_limit_of_the_request_is_named(
    sizes: tuple[dict[str, Any], ...], problem: str
) -> None:
    """It is known from headers alone; what an item turns out to have later takes the place of its claim."""
    request = with_items()
    for number, size in enumerate(sizes):
        assert not request.has_news()
        for claimed in ({name: value / 2 for name, value in size.items() if name.endswith("_s")}, size):
            message = ItemSize(request_id="r", item_index=number, size=MediaSize(**claimed))
            request.on_item_size(message)
    with pytest.raises(MediaError) as refused:
        request.take()
    assert refused.value.message == f"third: with this {problem} are allowed in all"
    assert refused.value.param == "third"


def test_just_the_limit_is_allowed_in_whatever_parts() -> None:
    request = with_items(dataclasses.replace(LIMITS, video_s=0.3))
    for number in range(3):
        size = MediaSize(video_s=0.1)
        request.on_item_size(ItemSize(request_id="r", item_index=number, size=size))
    assert not request.has_news()


def test_what_came_of_an_item_counts_instead_of_its_claim() -> None:
    """A late claim changes nothing, and one about an item that the request does not have is no item."""
    request = with_items()
    large = MediaSize(visual_tokens=100)
    request.on_item_size(ItemSize(request_id="r", item_index=0, size=large))
    for number, size in ((0, large), (1, MediaSize())):
        done = EncodeDone(request_id="r", item_index=number, modality="image", content_key="k",
                          media_tokens=50, size=size)  # fmt: skip
        request.on_encode_done(done)
    for number in (0, 7):
        request.on_item_size(ItemSize(request_id="r", item_index=number, size=large))
    assert not request.has_news()
    request.on_item_size(ItemSize(request_id="r", item_index=2, size=MediaSize(visual_tokens=1)))
    assert request.has_news()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_item_that_passes_the_visual_limit_is_named(order: tuple[int, ...]) -> None:
    """A video's sound and a sound count for nothing."""
    request = with_items()
    kinds: list[tuple[Modality, int, int]] = [("image", 60, 0), ("audio", 500, 500), ("video", 90, 49)]
    for number in order:
        modality, tokens, sound = kinds[number]
        assert not request.has_news()
        request.on_encode_done(
            EncodeDone(request_id="r", item_index=number, modality=modality, content_key="k",
                       media_tokens=tokens, audio_tokens=sound)
        )  # fmt: skip
    with pytest.raises(MediaError, match="101 visual tokens, at most 100 are allowed in all") as refused:
        request.take()
    assert refused.value.param == ("first", "second", "third")[order[-1]]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12), order=st.randoms(use_true_random=False),
    repeats=st.lists(st.integers(0, 11), max_size=4),
)  # fmt: skip
def test_chunks_come_out_in_order_whatever_order_they_came_in(
    sizes: list[int], order: random.Random, repeats: list[int]
) -> None:
    chunks, at = [], 0
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        chunks.append(chunk(at, size, finish_reason="stop" if last else None))
        at += size
    arrivals = [*chunks, *(chunks[number] for number in repeats if number < len(chunks))]
    order.shuffle(arrivals)
    request = live([], released := [])
    out: list[int] = []
    told = order.randrange(len(arrivals) + 1)  # how many come before the encoder's last word
    for number, one in enumerate([*arrivals, None]):
        if number == told:
            assert not out
            request.on_encode_done(ENCODED)
            for taken in request.take():
                out += taken.token_ids
        if one is not None:
            request.on_chunk(one)
        for taken in request.take():
            out += taken.token_ids
    assert out == list(range(at))
    assert request.done
    assert sorted(released) == ["d", "e", "p"]
    sent: list[str] = []
    request.close(lambda address, abort: sent.append(address), "end")
    assert sent == []
    assert len(released) == 3


def test_an_empty_last_chunk_ends_the_answer() -> None:
    request = encoded()
    request.on_chunk(chunk(1, 0, finish_reason="stop"))
    assert not request.done
    request.on_chunk(chunk(0))
    assert request.done
    assert [one.token_ids for one in request.take()] == [[0], []]


def test_a_closed_request_hears_nothing_more() -> None:
    """A stage that was told to stop may answer with an error: that is no failure of the client's request."""
    request = encoded()
    request.on_chunk(chunk(0))
    assert request.take()
    request.close(lambda address, abort: None, "stop")
    error = ErrorInfo(status=500, code="internal_error", message="aborted")
    request.on_failed(RequestFailed(request_id="r", error=error, stage="decode"))
    request.on_chunk(chunk(1))
    assert not request.has_news()


def test_tokens_come_before_the_error_that_follows_them() -> None:
    request = encoded()
    request.on_chunk(chunk(0))
    request.on_lost("d", "decode", "killed", True)
    assert [one.index for one in request.take()] == [0]
    with pytest.raises(StageLostError, match="decode worker of this request was lost: killed"):
        request.take()


@pytest.mark.parametrize(
    ("news", "held"),
    [
        ([], ["e", "p", "d"]),
        (["encoded"], ["e", "p", "d"]),
        ([0, 1], ["e", "p", "d"]),
        ([0, 1, "encoded"], ["d"]),
        (["encoded", 0], ["p", "d"]),
        (["encoded", 0, 1], ["d"]),
    ],
)
def test_a_loss_matters_as_long_as_the_worker_holds_a_part(news: list[Any], held: list[str]) -> None:
    def arrive(request: LiveRequest) -> None:
        for one in news:
            if one == "encoded":
                request.on_encode_done(ENCODED)
            else:
                request.on_chunk(chunk(one))

    request = live([], [])
    arrive(request)
    sent: list[str] = []
    request.close(lambda address, abort: sent.append(address), "gone")
    assert sent == held
    for address, stage in (("e", "encoder"), ("p", "prefill"), ("d", "decode")):
        request = live([], [])
        arrive(request)
        request.on_lost(address, cast(StageName, stage), "killed", True)
        assert (request.error is not None) == (address in held)


@pytest.mark.parametrize(
    ("stage", "tokens", "decodes", "matters"),
    [
        ("encoder", 0, True, True), ("encoder", 1, True, False), ("encoder", 1, False, False),
        ("prefill", 1, True, True), ("prefill", 2, True, False), ("prefill", 2, False, True),
        ("decode", 2, True, True),
    ],
)  # fmt: skip
def test_what_a_worker_takes_for_lost_matters_until_it_has_been_answered(
    stage: str, tokens: int, decodes: bool, matters: bool
) -> None:
    error = ErrorInfo(status=502, code="stage_lost", message="the worker of this request was lost")
    request = encoded()
    if not decodes:
        request.decode = None
    for index in range(tokens):
        request.on_chunk(chunk(index))
    request.on_failed(RequestFailed(request_id="r", error=error, stage=stage))
    assert (request.error is not None) == matters


def test_a_prefill_worker_that_decodes_too_matters_to_the_end() -> None:
    released: list[str] = []
    request = encoded(released)
    request.decode = None
    for index in range(3):
        request.on_chunk(chunk(index))
    assert "p" not in released
    request.on_lost("p", "prefill", "killed", True)
    with pytest.raises(StageLostError, match="prefill worker"):
        request.take() and request.take()
    assert "p" in released


def test_a_full_send_queue_undoes_the_whole_request() -> None:
    wire = Wire()
    fleet = make_fleet(wire, Clock(), [])
    wake_all(fleet)
    table = RequestTable()
    dispatcher = Dispatcher(fleet, table, "tcp://gateway")
    wire.full = {"tcp://p0", "tcp://p1"}
    item = MediaItem(modality="image", param="p", data=b"x")
    plan = Plan(Prompt([TextPart([1])], 1), Sampling(max_tokens=5))
    with pytest.raises(OverloadedError), dispatcher.open("r", [plan], [Attachment(item, "k")], timeout_s=9):
        pass
    assert len(table) == 0
    assert {address[6] for address, _ in wire.aborts()} == {"e", "d"}
    fleet.check_integrity()
    assert all(worker.own_requests == 0 for worker in fleet.workers())


def test_choices_of_one_prompt_share_their_prefill_worker() -> None:
    wire = Wire()
    fleet = make_fleet(wire, Clock(), [])
    wake_all(fleet)
    dispatcher = Dispatcher(fleet, RequestTable(), "tcp://gateway")
    prompts = [Prompt([TextPart([n])], 1) for n in range(2)]
    plans = [Plan(prompt, spread_seed(Sampling(max_tokens=5), k)) for prompt in prompts for k in range(2)]
    with dispatcher.open("r", plans, [], timeout_s=9):
        jobs = [(address, one) for address, one in wire.sent if isinstance(one, PrefillJob)]
    assert [job.request_id for _, job in jobs] == ["r-0", "r-1", "r-2", "r-3"]
    assert jobs[0][0] == jobs[1][0] != jobs[2][0] == jobs[3][0]


class RequestMachine(RuleBasedStateMachine):
    """Requests begin, get news, lose workers and end in any order; the counters always add up."""

    def __init__(self) -> None:
        super().__init__()
        self.wire, self.clock = Wire(), Clock()
        self.table = RequestTable()
        self.fleet = Fleet(
            cast(Transport, self.wire),
            ADDRESSES,
            on_lost=self.table.lost,
            ping_interval_s=0.5,
            worker_timeout_s=10,
            clock=self.clock,
            rng=random.Random(1),
        )
        self.dispatcher = Dispatcher(self.fleet, self.table, "tcp://gateway")
        self.open: list[tuple[Any, Any]] = []
        self.number = 0
        wake_all(self.fleet)

    @rule(items=st.integers(0, 2), choices=st.integers(1, 2))
    def begin(self, items: int, choices: int) -> None:
        self.number += 1
        media = [Attachment(MediaItem(modality="image", param="p", data=b"x"), f"k{n}") for n in range(items)]
        plan = Plan(Prompt([TextPart([1, 2])], 2), Sampling(max_tokens=5))
        context = self.dispatcher.open(f"r{self.number}", [plan] * choices, media, timeout_s=9)
        try:
            self.open.append((context, context.__enter__()))
        except UnavailableError:
            assert self.fleet.missing()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), index=st.integers(0, 3), last=st.booleans())
    def tokens(self, which: int, index: int, last: bool) -> None:
        exchange = self.open[which % len(self.open)][1]
        for choice in exchange.choices:
            choice.on_chunk(chunk(index, finish_reason="stop" if last else None))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5), item=st.integers(0, 1))
    def encodes(self, which: int, item: int) -> None:
        exchange = self.open[which % len(self.open)][1]
        for choice in exchange.choices:
            choice.on_encode_done(msgspec.structs.replace(ENCODED, item_index=item))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5))
    def fails(self, which: int) -> None:
        exchange = self.open[which % len(self.open)][1]
        error = ErrorInfo(status=400, code="invalid_media", message="bad")
        exchange.choices[0].on_failed(RequestFailed(request_id="r", error=error, stage="encoder"))

    def _held_by(self, address: str) -> list[LiveRequest]:
        return [
            choice
            for _, exchange in self.open
            for choice in exchange.choices
            if not choice.done and any(work.held and work.address == address for work in choice.works())
        ]

    @rule(address=st.sampled_from([one for group in ADDRESSES.values() for one in group]))
    def lose(self, address: str) -> None:
        held = self._held_by(address)
        known = bool(self.fleet[address].incarnation)
        self.fleet.lost(address, "killed")
        assert not known or all(choice.error is not None for choice in held)

    @rule(address=st.sampled_from([one for group in ADDRESSES.values() for one in group]))
    def return_(self, address: str) -> None:
        self.fleet.pong(address, pong(self.fleet[address].stage, "next"))

    @rule(address=st.sampled_from([one for group in ADDRESSES.values() for one in group]))
    def break_(self, address: str) -> None:
        worker = self.fleet[address]
        if not worker.incarnation:
            return
        held = self._held_by(address)
        news = pong(worker.stage, worker.incarnation, breaks=(worker.breaks or 0) + 1)
        self.fleet.pong(address, news)
        assert all(choice.error is not None for choice in held)
        assert worker.ready

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5))
    def end(self, which: int) -> None:
        context, _ = self.open.pop(which % len(self.open))
        context.__exit__(None, None, None)

    @invariant()
    def counters_add_up(self) -> None:
        self.fleet.check_integrity()
        counted: dict[str, int] = {}
        for _, exchange in self.open:
            for choice in exchange.choices:
                for work in choice.works():
                    if work.counted:
                        counted[work.address] = counted.get(work.address, 0) + 1
        for worker in self.fleet.workers():
            assert worker.own_requests == counted.get(worker.address, 0)
        assert len(self.table) == sum(len(exchange.choices) for _, exchange in self.open)

    def teardown(self) -> None:
        for context, _ in self.open:
            context.__exit__(None, None, None)
        assert len(self.table) == 0


TestRequestMachine = RequestMachine.TestCase
TestRequestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
