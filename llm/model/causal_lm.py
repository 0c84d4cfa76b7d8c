"""What the engine asks of any architecture: embeddings in, hidden states and logits out (llm, trainer).

Knows neither requests nor KV caches; an architecture's module knows nothing of the engine either.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from transom.kernels.weights import Slot
from transom.llm.model.attention import AttentionBackend
from transom.llm.model.parts import DecoderParts
from transom.llm.model.spec import DecoderConfig


class CausalLM(nn.Module):
    """A decoder over flat packed tokens. Subclasses build `layers`, `norm` and, if they have any, `mtp`."""

    # Tensors of a checkpoint with these prefixes belong to another stage, or are not used.
    ignored_prefixes: tuple[str, ...] = ()

    config: DecoderConfig
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    mtp: nn.ModuleList

    def tie(self) -> None:
        """Make the head share the embedding's rows, if the checkpoint says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (tokens, hidden) for token ids (tokens,)."""
        out: torch.Tensor = self.embed_tokens(ids)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (rows, vocab); pass only the rows that are needed."""
        out: torch.Tensor = self.lm_head(hidden)
        return out.float()

    def parts(self) -> DecoderParts | None:
        """Return the layers' weights for the fused kernels; None: torch runs the modules."""
        return None

    def keep_fp32(self) -> Iterable[nn.Module]:
        """Return the modules that stay fp32 in a half-precision model."""
        return ()

    @abstractmethod
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend) -> Any:
        """Return hidden states (tokens, hidden) after the final norm for embeddings x (tokens, hidden).

        `positions` (tokens,) count from 0 within each request; media embeddings take part like any token's.
        """

    @abstractmethod
    def slots(self, is_in_checkpoint: Callable[[str], bool]) -> dict[str, Slot]:
        """Map a checkpoint's tensor names to views of the parameters; the argument tells which exist."""
