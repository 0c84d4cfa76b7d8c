"""The transport over real sockets: framing, bounds, loss of a peer, keys."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.patience import PATIENCE_S
from transom.curve import FleetKey, is_loopback
from transom.errors import ConfigError, OverloadedError, ProtocolError, StageLostError, UnavailableError
from transom.messages import Abort, EmbeddingChunk, Ping, TensorMeta, encode_header
from transom.transport import Transport

PING = Ping(reply_to="tcp://127.0.0.1:1", nonce=1)
MAGIC = encode_header(PING)[:5]  # with the version
NEWER = MAGIC[:4] + bytes([MAGIC[4] + 1])


def chunk(rows: int, hidden: int = 8) -> EmbeddingChunk:
    return EmbeddingChunk(
        request_id="r",
        item_index=0,
        chunk_index=0,
        last=True,
        content_key="k",
        token_ids=[5] * rows,
        pad_ids=(5,),
        rows=TensorMeta("float32", (rows, hidden)),
    )


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Transport, Transport]]:
    """Two started transports; the first may queue 1 MB for a peer."""
    left = Transport(send_buffer_bytes=1_000_000, connect_timeout_s=PATIENCE_S)
    right = Transport(connect_timeout_s=PATIENCE_S)
    await left.start()
    await right.start()
    yield left, right
    await left.close()
    await right.close()


@pytest.fixture
async def raw(transport: Transport) -> AsyncIterator[zmq.asyncio.Socket]:
    """A bare DEALER connected to the transport, for what a transom peer would never send."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, b"stranger")
    socket.connect(transport.address)
    yield socket
    socket.close()
    context.term()


async def test_messages_arrive_in_order_with_their_frames(pair: tuple[Transport, Transport]) -> None:
    left, right = pair
    payloads = [os.urandom(rows * 32) for rows in (1, 3, 2000, 4)]
    for data in payloads:
        await left.send_wait(right.address, chunk(len(data) // 32), [data])
    for data in payloads:
        received = await right.recv()
        assert received.peer == left.address
        assert received.message == chunk(len(data) // 32)
        assert [bytes(frame) for frame in received.frames] == [data]


async def test_frames_outlive_later_messages(pair: tuple[Transport, Transport]) -> None:
    left, right = pair
    await left.send_wait(right.address, chunk(1000), [b"\1" * 32_000])
    kept = await right.recv()
    for _ in range(20):
        await left.send_wait(right.address, chunk(1000), [b"\2" * 32_000])
        await right.recv()
    assert bytes(kept.frames[0]) == b"\1" * 32_000


HOSTILE = {
    "no magic": [b"hello"],
    "foreign magic": [b"HTTP\1" + encode_header(PING)[5:]],
    "newer version": [NEWER + encode_header(PING)[5:]],
    "magic alone": [b"TRSM"],
    "empty header": [b""],
    "truncated body": [encode_header(PING)[:-2]],
    "unknown tag": [MAGIC + b"\x81\xa4type\xa6delete"],
    "no tag": [MAGIC + b"\x80"],
    "not a map": [MAGIC + b"\x93\1\2\3"],
    "nested beyond the stack": [MAGIC + b"\x91" * 100_000],
    "map of 4 billion": [MAGIC + b"\xdf\xff\xff\xff\xff"],
    "missing frame": [encode_header(chunk(2))],
    "extra frame": [encode_header(chunk(2)), bytes(64), b"x"],
    "short frame": [encode_header(chunk(2)), bytes(63)],
    "long frame": [encode_header(chunk(2)), bytes(65)],
    "negative shape": [encode_header(chunk(0)).replace(b"\x92\x00\x08", b"\x92\xff\xff"), bytes(4)],
    "unexpected frame": [encode_header(PING), b"x"],
    "too many frames": [encode_header(PING), *[b""] * 5000],
    "nothing": [],
    "pickle": [b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."],
    "pickle after the magic": [MAGIC + b"cposix\nsystem\n(S'true'\ntR."],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_not_the_protocol_is_counted_and_dropped(
    transport: Transport, raw: zmq.asyncio.Socket, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A DEALER can't send an empty multipart message: one empty frame is the least.
    await raw.send_multipart(HOSTILE[name] or [b""])
    await raw.send_multipart([encode_header(PING)])
    received = await transport.recv()
    assert received.message == PING
    assert received.peer == "stranger"
    assert transport.protocol_errors == {"stranger": 1}
    assert "dropped a message from stranger" in caplog.text


def test_hostile_headers_differ_from_good_ones() -> None:
    """The negative shape above is made by replacing bytes: make sure that it replaced them."""
    assert HOSTILE["negative shape"][0] != encode_header(chunk(0))


async def test_pickle_is_not_executed(transport: Transport, raw: zmq.asyncio.Socket, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    command = f"touch {target}".encode()
    payload = b"cposix\nsystem\n(S'" + command + b"'\ntR."
    for frames in ([payload], [MAGIC + payload], [encode_header(chunk(1)), payload]):
        await raw.send_multipart(frames)
    await raw.send_multipart([encode_header(PING)])
    await transport.recv()
    assert transport.protocol_errors["stranger"] == 3
    assert not target.exists()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, struct.pack(">Q", 2**63)])
async def test_a_socket_that_is_no_zmq_peer_changes_nothing(transport: Transport, garbage: bytes) -> None:
    host, port = transport.address.removeprefix("tcp://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(garbage)
    other = Transport()
    await other.start()
    other.send(transport.address, PING)
    assert (await transport.recv()).message == PING
    writer.close()
    await other.close()


async def test_send_refuses_frames_that_do_not_fit_the_header(pair: tuple[Transport, Transport]) -> None:
    left, right = pair
    with pytest.raises(ProtocolError, match="frame 1 has 63 bytes, header says"):
        left.send(right.address, chunk(2), [bytes(63)])


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "inproc://x", "pgm://127.0.0.1:1", "nonsense"])
async def test_send_refuses_addresses_that_no_peer_has(transport: Transport, address: str) -> None:
    with pytest.raises(ProtocolError, match="scheme must be tcp or ipc"):
        transport.send(address, PING)


async def silent_peer() -> tuple[zmq.asyncio.Context, zmq.asyncio.Socket, str]:
    """A ROUTER that accepts the connection and reads nothing."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 4096)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return context, socket, f"tcp://127.0.0.1:{port}"


async def test_queue_to_a_peer_that_does_not_read_is_bounded(pair: tuple[Transport, Transport]) -> None:
    left, _ = pair
    context, socket, address = await silent_peer()
    message, frame = chunk(4096), bytes(4096 * 32)
    sent = 0

    async def fill() -> None:
        nonlocal sent
        while sent < 5000:
            left.send(address, message, [frame])
            sent += 1
            await asyncio.sleep(0)

    with pytest.raises(OverloadedError, match=r"send queue to .* is full") as full:
        await fill()
    assert full.value.retry_after_s == 1
    assert left._peers[address].queued_bytes <= 1_000_000

    # The kernel's buffers take some more; then a sender that waits is held.
    while True:
        waiting = asyncio.create_task(left.send_wait(address, message, [frame]))
        sent += 1
        if (await asyncio.wait({waiting}, timeout=0.3))[1]:
            break
        assert sent < 5000, "the queue never filled"
    for _ in range(sent - 1):
        await socket.recv_multipart()
    await asyncio.wait_for(waiting, PATIENCE_S)
    socket.close()
    context.term()


async def test_a_message_larger_than_the_bound_still_passes(pair: tuple[Transport, Transport]) -> None:
    left, right = pair
    data = os.urandom(2_000_000 // 32 * 32)
    await left.send_wait(right.address, chunk(len(data) // 32), [data])
    assert bytes((await right.recv()).frames[0]) == data


async def test_waiting_senders_learn_of_a_lost_peer(pair: tuple[Transport, Transport]) -> None:
    left, _ = pair
    context, socket, address = await silent_peer()
    lost: asyncio.Queue[str] = asyncio.Queue()
    left.on_peer_lost = lost.put_nowait

    async def flood() -> None:
        while True:
            await left.send_wait(address, chunk(4096), [bytes(4096 * 32)])

    flooding = asyncio.create_task(flood())
    done, _ = await asyncio.wait({flooding}, timeout=0.3)
    assert not done
    socket.close()
    context.term()
    assert await asyncio.wait_for(lost.get(), PATIENCE_S) == address
    with pytest.raises(StageLostError, match="was lost") as loss:
        await asyncio.wait_for(flooding, PATIENCE_S)
    assert address not in loss.value.message  # it may reach a client


async def test_loss_is_reported_once_and_a_new_peer_at_the_address_is_reached(
    pair: tuple[Transport, Transport],
) -> None:
    left, right = pair
    lost: asyncio.Queue[str] = asyncio.Queue()
    left.on_peer_lost = lost.put_nowait
    left.watch(right.address)
    left.send(right.address, PING)
    await right.recv()
    await right.close()
    assert await asyncio.wait_for(lost.get(), PATIENCE_S) == right.address
    successor = Transport(bind=right.address)
    await successor.start()
    left.send(successor.address, PING)
    assert (await successor.recv()).message == PING
    assert lost.empty()
    await successor.close()


async def test_nobody_there_is_a_loss_after_the_timeout() -> None:
    own = Transport(connect_timeout_s=0.2)
    await own.start()
    lost: asyncio.Queue[str] = asyncio.Queue()
    own.on_peer_lost = lost.put_nowait
    own.send("tcp://127.0.0.1:9", PING)
    assert await asyncio.wait_for(lost.get(), PATIENCE_S) == "tcp://127.0.0.1:9"
    await own.close()


async def test_a_loop_that_stood_still_takes_no_peer_for_absent(pair: tuple[Transport, Transport]) -> None:
    _, right = pair
    own = Transport(connect_timeout_s=0.2)
    await own.start()
    own.send(right.address, PING)
    await asyncio.sleep(0)  # it waits for the connection
    time.sleep(0.5)  # noqa: ASYNC251  which the other side makes meanwhile
    assert (await asyncio.wait_for(right.recv(), PATIENCE_S)).message == PING
    await own.close()


async def test_a_peer_that_starts_late_gets_what_was_sent_before() -> None:
    early, late = Transport(connect_timeout_s=PATIENCE_S), Transport()
    await late.start()
    address = late.address
    await late.close()
    await early.start()
    early.send(address, PING)
    late = Transport(bind=address)
    await late.start()
    assert (await late.recv()).message == PING
    await early.close()
    await late.close()


async def test_a_returning_peer_with_the_same_identity_takes_over(transport: Transport) -> None:
    first = Transport()
    await first.start()
    address = first.address
    first.send(transport.address, Abort(request_id="1", reason=""))
    assert (await transport.recv()).peer == address
    await first.close()
    second = Transport(bind=address)
    await second.start()
    second.send(transport.address, Abort(request_id="2", reason=""))
    received = await transport.recv()
    assert (received.peer, received.message) == (address, Abort(request_id="2", reason=""))
    await second.close()


async def test_flush_waits_for_queued_messages(pair: tuple[Transport, Transport]) -> None:
    left, right = pair
    left.send(right.address, PING)
    await left.flush(5)
    assert left._peers[right.address].queued_bytes == 0
    assert (await right.recv()).message == PING


async def test_ipc_addresses_work(tmp_path: Path) -> None:
    left, right = Transport(bind=f"ipc://{tmp_path}/a"), Transport(bind=f"ipc://{tmp_path}/b")
    await left.start()
    await right.start()
    left.send(right.address, PING)
    assert (await right.recv()).peer == f"ipc://{tmp_path}/a"
    await left.close()
    await right.close()


async def test_a_taken_address_is_an_error_that_names_it(transport: Transport) -> None:
    with pytest.raises(UnavailableError, match=f"can't bind {transport.address}: Address already in use"):
        await Transport(bind=transport.address).start()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[FleetKey, FleetKey]:
    for name in ("ours", "theirs"):
        FleetKey.create(tmp_path / name)
    return FleetKey.load(tmp_path / "ours"), FleetKey.load(tmp_path / "theirs")


async def test_holders_of_the_fleet_key_talk(keys: tuple[FleetKey, FleetKey]) -> None:
    left, right = (Transport(key=keys[0], connect_timeout_s=PATIENCE_S) for _ in range(2))
    await left.start()
    await right.start()
    left.send(right.address, chunk(1), [bytes(32)])
    assert (await asyncio.wait_for(right.recv(), PATIENCE_S)).message == chunk(1)
    await left.close()
    await right.close()


@pytest.mark.parametrize("intruder", ["other key", "no key"])
async def test_others_are_refused(keys: tuple[FleetKey, FleetKey], intruder: str) -> None:
    own = Transport(key=keys[0])
    stranger = Transport(key=keys[1] if intruder == "other key" else None, connect_timeout_s=1.0)
    friend = Transport(key=keys[0], connect_timeout_s=PATIENCE_S)
    for each in (own, stranger, friend):
        await each.start()
    lost: asyncio.Queue[str] = asyncio.Queue()
    stranger.on_peer_lost = lost.put_nowait
    stranger.send(own.address, Abort(request_id="evil", reason=""))
    assert await asyncio.wait_for(lost.get(), PATIENCE_S) == own.address
    friend.send(own.address, PING)
    assert (await asyncio.wait_for(own.recv(), PATIENCE_S)).message == PING
    for each in (own, stranger, friend):
        await each.close()


async def test_a_client_with_the_public_key_alone_is_refused(keys: tuple[FleetKey, FleetKey]) -> None:
    """Knowing the fleet's public key must not be enough: the client's own pair is checked."""
    own = Transport(key=keys[0])
    await own.start()
    forged = FleetKey(public=keys[0].public, secret=keys[1].secret)
    stranger = Transport(key=forged, connect_timeout_s=1.0)
    await stranger.start()
    lost: asyncio.Queue[str] = asyncio.Queue()
    stranger.on_peer_lost = lost.put_nowait
    stranger.send(own.address, PING)
    assert await asyncio.wait_for(lost.get(), PATIENCE_S) == own.address
    await stranger.close()
    await own.close()


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://localhost.example.org:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://eth0:1", False),
        ("tcp://:1", False),
    ],
)
def test_only_loopback_goes_without_a_key(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
    if not loopback:
        with pytest.raises(ConfigError, match="not loopback: set --curve-key-file"):
            Transport(bind=address)


async def test_connecting_off_loopback_needs_the_key_too(transport: Transport) -> None:
    with pytest.raises(ConfigError, match="not loopback"):
        transport.send("tcp://10.1.2.3:5", PING)


def test_key_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    FleetKey.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="File exists"):
        FleetKey.create(path)
    key = FleetKey.load(path)
    assert key.secret.decode() not in repr(key)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="readable by others: chmod 600"):
        FleetKey.load(path)


@pytest.mark.parametrize("content", ["", "one", "a b c", "é", "x" * 40 + "\n" + "y" * 39])
def test_malformed_key_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="fleet key file"):
        FleetKey.load(path)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        FleetKey.load(tmp_path / "absent")
