"""KV on the wire: the same values come out, whatever the dtype and the buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transom.errors import ProtocolError
from transom.kernels.kv_rows import FP8, stored_dtype, to_rows
from transom.llm.kv_transfer import from_frame, handoff_bytes, pack_kv, to_frame, unpack_kv, unpack_return
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.llm.pools import HostKV
from transom.messages import KVHandoff, KVReturn, Sampling, TensorMeta, check_frames


def host_kv(length: int, swa_len: int, dtype: torch.dtype) -> HostKV:
    generator = torch.Generator().manual_seed(length)
    shapes = (2, length, 1, 12), (2, length, 1, 8), (3, swa_len, 2, 12), (3, swa_len, 2, 8)
    stored = stored_dtype(dtype)
    return HostKV(length, swa_len, *(to_rows(torch.randn(*s, generator=generator), stored) for s in shapes))


def message(kv: HostKV, metas: tuple[TensorMeta, ...], **changes: Any) -> KVHandoff:
    fields: dict[str, Any] = {
        "request_id": "r", "prompt_ids": [1] * kv.length, "first_token": 2, "prompt_len": kv.length,
        "swa_len": kv.swa_len, "sampling": Sampling(max_tokens=2), "deadline_s": 1.0, "gateway": "tcp://g:1",
        "tensors": metas,
    }  # fmt: skip
    return KVHandoff(**{**fields, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(("length", "swa_len"), [(1, 1), (8, 8), (30, 8), (30, 12)])
def test_what_is_packed_is_unpacked(
    model: MiMoV2ForCausalLM, dtype: torch.dtype, read_only: bool, length: int, swa_len: int
) -> None:
    kv = host_kv(length, swa_len, dtype)
    metas, frames = pack_kv(kv)
    assert sum(memoryview(f).nbytes for f in frames) == kv.size_bytes
    sent = [bytes(f) if read_only else bytearray(f) for f in frames]
    handoff = message(kv, metas)
    check_frames(handoff, sent)
    for got, want in zip(unpack_kv(handoff, sent, model.config, dtype).tensors, kv.tensors):
        assert torch.equal(got, want)
    if swa_len == min(length, 8):
        assert kv.size_bytes == handoff_bytes(model.config, length, dtype.itemsize)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt_ids": [1]}, "1 prompt ids"),
        ({"prompt_len": 0, "prompt_ids": []}, "prompt_len is 0"),
        ({"swa_len": 7}, "swa_len is 7, needed 8"),
        ({"swa_len": 21}, "swa_len is 21"),
        ({"swa_len": 9}, "another model"),
        ({"tensors": ()}, "another model"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    model: MiMoV2ForCausalLM, changes: dict[str, Any], text: str
) -> None:
    kv = host_kv(20, 8, torch.float32)
    metas, frames = pack_kv(kv)
    with pytest.raises(ProtocolError, match=text):
        unpack_kv(message(kv, metas, **changes), frames, model.config, torch.float32)


@pytest.mark.parametrize(
    ("sent", "own", "text"),
    [
        (FP8, torch.float32, "KV of uint8 for pools of float32"),
        (torch.float32, FP8, "KV of float32 for pools of fp8"),
        (torch.bfloat16, torch.float32, "KV of bfloat16 for pools of float32"),
    ],
)
def test_kv_of_another_dtype_is_refused_not_converted(
    model: MiMoV2ForCausalLM, sent: torch.dtype, own: torch.dtype, text: str
) -> None:
    kv = host_kv(20, 8, sent)
    metas, frames = pack_kv(kv)
    with pytest.raises(ProtocolError, match=f"{text}: prefill and decode workers need the same kv_dtype"):
        unpack_kv(message(kv, metas), frames, model.config, own)
    answer = KVReturn(request_id="r", output_ids=[1], begin=0, end=20, swa_len=8, tensors=metas)
    assert unpack_return(answer, frames, model.config, sent).length == 20
    with pytest.raises(ProtocolError, match=text):
        unpack_return(answer, frames, model.config, own)


def test_frames_of_no_rows_and_of_other_types() -> None:
    meta, frame = to_frame(torch.zeros(0, 32))
    assert from_frame(meta, frame).shape == (0, 32)
    with pytest.raises(ProtocolError, match="int64"):
        from_frame(TensorMeta("int64", (1,)), bytes(8))
