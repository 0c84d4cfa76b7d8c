"""What a layer asks of attention, and the uncached backend over packed requests (trainer; oracle in tests).

The backend owns the KV cache: the model hands it rotated q and k and scaled v, and never sees a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from transom.kernels.attention import dense_attention
from transom.llm.model.spec import LayerSpec


class AttentionBackend(Protocol):
    """Store new K and V and attend to everything each query may see.

    Rows are the tokens of all requests of the step, packed without padding, in an order the backend knows.
    """

    def attend(
        self,
        layer: int,
        spec: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (tokens, heads, v_head_dim) for one layer; MTP module k is layer num_layers + k.

        q is (tokens, heads, head_dim), k (tokens, kv_heads, head_dim), v (tokens, kv_heads, v_head_dim), sink
        (heads) or None. q and k are rotated, v carries the value scale: the cache holds what arrives here.
        """
        ...


# A padded row costs as much as a real one; a further group costs a handful of small kernels.
_MAX_PADDED_SHARE = 1.25


class PackedAttention:
    """Causal attention within each of the packed requests, without a cache.

    Requests of similar length run as one batch; shorter ones are padded at their end, where causality keeps
    the padding out of sight of real tokens.
    """

    def __init__(self, seq_lens: Sequence[int]) -> None:
        if not seq_lens or min(seq_lens) < 1:
            raise ValueError(f"seq_lens must all be positive, not {list(seq_lens)}")
        self.seq_lens = list(seq_lens)
        self._groups, self._places = _group_requests(self.seq_lens)

    def attend(
        self,
        layer: int,
        spec: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        outputs = []
        for batch, length, rows in self._groups:
            grouped = q, k, v
            if rows is not None:
                index = rows.to(q.device)
                grouped = q.index_select(0, index), k.index_select(0, index), v.index_select(0, index)
            batched = [x.view(batch, length, *x.shape[1:]) for x in grouped]
            out = dense_attention(*batched, scale=spec.scale, window=spec.window, sink=sink)
            outputs.append(out.flatten(0, 1))
        if self._places is None:
            return outputs[0]
        return torch.cat(outputs).index_select(0, self._places.to(q.device))


_Group = tuple[int, int, torch.Tensor | None]


def _group_requests(seq_lens: list[int]) -> tuple[list[_Group], torch.Tensor | None]:
    """Return groups (batch, length, their packed rows) and each packed row's place in the groups' outputs."""
    if len(set(seq_lens)) == 1:
        return [(len(seq_lens), seq_lens[0], None)], None
    starts = torch.tensor([0, *seq_lens]).cumsum(0)[:-1].tolist()
    members: list[list[int]] = []
    for request in sorted(range(len(seq_lens)), key=lambda r: -seq_lens[r]):
        if members and seq_lens[members[-1][0]] <= seq_lens[request] * _MAX_PADDED_SHARE:
            members[-1].append(request)
        else:
            members.append([request])
    groups: list[_Group] = []
    places = torch.empty(sum(seq_lens), dtype=torch.int64)
    offset = 0
    for group in members:
        length = seq_lens[group[0]]
        rows = torch.empty(len(group), length, dtype=torch.int64)
        for row, request in zip(rows, group):
            real = seq_lens[request]
            row[:real] = torch.arange(starts[request], starts[request] + real)
            row[real:] = starts[request]
            places[starts[request] : starts[request] + real] = torch.arange(offset, offset + real)
            offset += length
        groups.append((len(group), length, rows.flatten()))
    return groups, places
