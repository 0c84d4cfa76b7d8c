"""What the gateway needs of a checkpoint beside its tokenizer: context length and media marker ids.

Read once at start from config.json; knows nothing of weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom.errors import CheckpointError
from transom.messages import Modality
from transom.tokenizer import Tokenizer

_PADS: dict[Modality, tuple[str, str]] = {
    "image": ("image_token_id", "<|image_pad|>"),
    "video": ("video_token_id", "<|video_pad|>"),
    "audio": ("audio_token_id", "<|audio_pad|>"),
}
# A template may enclose a video by its own markers or by those of pictures.
_EDGES: dict[Modality, tuple[str, ...]] = {
    "image": ("vision",),
    "video": ("video", "vision"),
    "audio": ("audio",),
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`pads` tells which modality's item stands at a token; the edges are markers around an item."""

    max_context: int
    pads: dict[int, Modality]
    starts: dict[Modality, frozenset[int]]
    ends: dict[Modality, frozenset[int]]

    @property
    def media_ids(self) -> frozenset[int]:
        """All ids that only the pipeline itself may put into a prompt."""
        edges = [*self.starts.values(), *self.ends.values()]
        return frozenset(self.pads).union(*edges)

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> ModelInfo:
        """Read config.json of a checkpoint folder; a text-only model has no pads."""
        path = Path(folder) / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        context = config.get("max_position_embeddings")
        if not isinstance(context, int) or context < 1:
            raise CheckpointError(f"{path}: max_position_embeddings is {context!r}, expected a positive int")
        processor = config.get("processor_config") or {}

        def find(field: str, spelling: str) -> int | None:
            for source in (config, processor):
                if isinstance(source.get(field), int):
                    return int(source[field])
            return tokenizer.token_id(spelling)

        def edge(modality: Modality, side: str) -> frozenset[int]:
            names = {"vision": "<|vision_{}|>", "video": "<|mimo_video_{}|>", "audio": "<|mimo_audio_{}|>"}
            found = (find(f"{name}_{side}_token_id", names[name].format(side)) for name in _EDGES[modality])
            return frozenset(id for id in found if id is not None)

        takes = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}
        pads: dict[int, Modality] = {}
        for modality, (field, spelling) in _PADS.items():
            id = find(field, spelling)
            if id is not None and config.get(takes[modality]):
                pads[id] = modality
        modalities = tuple(_PADS)
        return cls(
            max_context=context,
            pads=pads,
            starts={modality: edge(modality, "start") for modality in modalities},
            ends={modality: edge(modality, "end") for modality in modalities},
        )
