"""How the KV of a prefilled request gets to its decode worker: the contract, and its form over the transport.

Runs on the event loops of both workers. Knows KV as host memory, not the pools it came from.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from transom.errors import ProtocolError, TransomError
from transom.kernels.kv_rows import FP8, stored_dtype, stored_size
from transom.llm.capacity import token_bytes
from transom.llm.model.spec import DecoderConfig, LayerSpec
from transom.llm.pools import HostKV
from transom.messages import Abort, Dtype, KVHandoff, KVReserve, KVReturn, TensorMeta
from transom.transport import Frame, Transport

_TORCH: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_WIRE: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
}
_KV_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", FP8: "fp8"}


def kv_name(dtype: torch.dtype) -> str:
    """Return the name of a KV dtype, as in the setting kv_dtype."""
    return _KV_NAMES[dtype]


def to_frame(tensor: torch.Tensor) -> tuple[TensorMeta, memoryview]:
    """Return the wire form of a host tensor; the frame shares its memory."""
    flat = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return TensorMeta(_WIRE[tensor.dtype], tuple(tensor.shape)), flat.data


def from_frame(meta: TensorMeta, frame: Frame) -> torch.Tensor:
    """Return a tensor over the frame's memory (a copy when that is read-only)."""
    dtype = _TORCH.get(meta.dtype)
    if dtype is None:
        raise ProtocolError(f"tensor of {meta.dtype}, expected {', '.join(_TORCH)}")
    return _over(meta, frame, dtype)


def _over(meta: TensorMeta, frame: Frame, dtype: torch.dtype) -> torch.Tensor:
    view = memoryview(frame)
    if not view.nbytes:
        return torch.empty(meta.shape, dtype=dtype)
    buffer = bytearray(view) if view.readonly else view
    return torch.frombuffer(buffer, dtype=dtype).view(meta.shape)


def pack_kv(host_kv: HostKV) -> tuple[tuple[TensorMeta, ...], list[Frame]]:
    """Return the tensors of a KVHandoff or KVReturn."""
    metas, frames = zip(*(to_frame(tensor) for tensor in host_kv.tensors))
    return metas, list(frames)


def unpack_kv(
    handoff: KVHandoff, frames: Sequence[Frame], config: DecoderConfig, dtype: torch.dtype
) -> HostKV:
    """Return the KV that came with `handoff`; raise ProtocolError unless it fits model and `dtype`."""
    full = [spec for spec in config.layers if spec.full]
    swa = [spec for spec in config.layers if not spec.full]
    length, swa_len = handoff.prompt_len, handoff.swa_len
    window = max(spec.window or 0 for spec in swa)
    if length < 1 or length != len(handoff.prompt_ids):
        raise ProtocolError(f"prompt_len is {length}, but {len(handoff.prompt_ids)} prompt ids came")
    if not min(length, window - 1) <= swa_len <= length:
        raise ProtocolError(f"swa_len is {swa_len}, needed {min(length, window - 1)} to {length}")
    full_k, full_v, swa_k, swa_v = _tensors(handoff, frames, [(full, length), (swa, swa_len)], dtype)
    return HostKV(length, swa_len, full_k, full_v, swa_k, swa_v)


def unpack_return(
    message: KVReturn, frames: Sequence[Frame], config: DecoderConfig, dtype: torch.dtype
) -> HostKV:
    """Return the KV of an answer; raise ProtocolError unless it fits model and `dtype`."""
    full = [spec for spec in config.layers if spec.full]
    swa = [spec for spec in config.layers if not spec.full]
    begin, end, swa_len = message.begin, message.end, message.swa_len
    if not (0 <= begin < end and 0 <= swa_len <= end):
        raise ProtocolError(f"KV from {begin} to {end} with {swa_len} of SWA")
    full_k, full_v, swa_k, swa_v = _tensors(message, frames, [(full, end - begin), (swa, swa_len)], dtype)
    return HostKV(end, swa_len, full_k, full_v, swa_k, swa_v, begin)


def _tensors(
    message: KVHandoff | KVReturn,
    frames: Sequence[Frame],
    parts: Sequence[tuple[Sequence[LayerSpec], int]],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    stored = stored_dtype(dtype)
    other = {meta.dtype for meta in message.tensors} - {_WIRE[stored]}
    if other:
        raise ProtocolError(
            f"KV of {', '.join(sorted(other))} for pools of {kv_name(dtype)}: prefill and decode workers need"
            " the same kv_dtype"
        )
    expected = [shape for specs, tokens in parts for shape in _kv_shapes(specs, tokens, dtype)]
    shapes = [meta.shape for meta in message.tensors]
    if shapes != expected:
        raise ProtocolError(f"KV of shapes {shapes}, expected {expected}: another model?")
    return [_over(meta, frame, stored) for meta, frame in zip(message.tensors, frames, strict=True)]


def _kv_shapes(specs: Sequence[LayerSpec], tokens: int, dtype: torch.dtype) -> list[tuple[int, ...]]:
    head = len(specs), tokens, specs[0].kv_heads
    return [(*head, stored_size(dim, dtype)) for dim in (specs[0].head_dim, specs[0].v_head_dim)]


def handoff_bytes(config: DecoderConfig, prompt_len: int, dtype_bytes: int, margin: int = 0) -> int:
    """Return the host memory that the KV of a prompt takes between prefill and decode.

    `margin` tokens of SWA rows come with those of the window.
    """
    full = [spec for spec in config.layers if spec.full]
    swa = [spec for spec in config.layers if not spec.full]
    window = max(spec.window or 0 for spec in swa) + margin
    return prompt_len * token_bytes(full, dtype_bytes) + min(prompt_len, window - 1) * token_bytes(
        swa, dtype_bytes
    )


class KVTransfer(ABC):
    """Prefill's side of the hand-over. All methods run on the event loop and return at once.

    Life of a request: `reserve` -> `granted`, and `offer`, in either order -> sent. `drop` is right at any
    time and for any id. The KV belongs to the transfer from `offer` until it is sent or dropped.
    """

    @abstractmethod
    def reserve(self, reserve: KVReserve, decode: str) -> None:
        """Ask a decode worker for room. Raise TransomError when it can't even be asked."""

    @abstractmethod
    def granted(self, request_id: str) -> None:
        """The decode worker holds room now."""

    @abstractmethod
    def offer(self, handoff: KVHandoff, host_kv: HostKV) -> None:
        """Send `host_kv` as soon as there is room for it; `handoff.tensors` is filled in here."""

    @abstractmethod
    def drop(self, request_id: str, reason: str) -> None:
        """Give the request up, on the decode worker too."""

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """KV that was offered and is not sent yet."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything up."""


@dataclass(slots=True, eq=False)
class _Transfer:
    decode: str
    granted: bool = False
    offered: tuple[KVHandoff, HostKV] | None = None
    sending: asyncio.Task[None] | None = field(default=None)


class ZmqKVTransfer(KVTransfer):
    """Hand-over as one KVHandoff message. `on_sent(request_id, error)` reports the end of each offer."""

    def __init__(self, transport: Transport, on_sent: Callable[[str, TransomError | None], None]) -> None:
        self._transport = transport
        self._on_sent = on_sent
        self._transfers: dict[str, _Transfer] = {}
        self._pending_bytes = 0

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def reserve(self, reserve: KVReserve, decode: str) -> None:
        self._transport.send(decode, reserve)
        self._transfers[reserve.request_id] = _Transfer(decode)

    def granted(self, request_id: str) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            transfer.granted = True
            self._send_if_due(request_id, transfer)

    def offer(self, handoff: KVHandoff, host_kv: HostKV) -> None:
        transfer = self._transfers.get(handoff.request_id)
        if transfer is None:  # closed meanwhile
            return
        transfer.offered = handoff, host_kv
        self._pending_bytes += host_kv.size_bytes
        self._send_if_due(handoff.request_id, transfer)

    def drop(self, request_id: str, reason: str) -> None:
        transfer = self._transfers.pop(request_id, None)
        if transfer is None:
            return
        self._unpend(transfer)
        if transfer.sending is not None:
            transfer.sending.cancel()
        # It may know the request from our KVReserve, and nobody else may get to tell it.
        try:
            self._transport.send(transfer.decode, Abort(request_id=request_id, reason=reason))
        except TransomError:
            return  # what can't be reached has lost the request as well

    async def close(self) -> None:
        tasks = [t.sending for t in self._transfers.values() if t.sending is not None]
        self._transfers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_if_due(self, request_id: str, transfer: _Transfer) -> None:
        if transfer.granted and transfer.offered is not None and transfer.sending is None:
            transfer.sending = asyncio.create_task(self._send(request_id, transfer, *transfer.offered))

    async def _send(self, request_id: str, transfer: _Transfer, handoff: KVHandoff, host_kv: HostKV) -> None:
        metas, frames = pack_kv(host_kv)
        message = msgspec.structs.replace(handoff, tensors=metas)
        failure: TransomError | None = None
        try:
            await self._transport.send_wait(transfer.decode, message, frames)
        except TransomError as error:
            failure = error
        self._transfers.pop(request_id, None)
        self._unpend(transfer)
        self._on_sent(request_id, failure)

    def _unpend(self, transfer: _Transfer) -> None:
        if transfer.offered is not None:
            self._pending_bytes -= transfer.offered[1].size_bytes
            transfer.offered = None
