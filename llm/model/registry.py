"""The architectures that are served, by `model_type` of a checkpoint's config.json (llm processes, planner).

To add one: a reader that fills a DecoderConfig, a CausalLM over the shared attention backend, an entry here.
Imports no torch before a model is built: the planner runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transom.errors import ConfigError
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.gemma3_config import Gemma3Config
from transom.llm.model.reader import read_json
from transom.llm.model.spec import DecoderConfig

if TYPE_CHECKING:
    from transom.llm.model.causal_lm import CausalLM


@dataclass(frozen=True)
class Architecture:
    """`read` builds the config; `module` and `name` are where its CausalLM is."""

    config: type[DecoderConfig]
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    module: str
    name: str


_MIMO_V2 = Architecture(
    MiMoV2Config, MiMoV2Config.from_dict, "transom.llm.model.mimo_v2", "MiMoV2ForCausalLM"
)
_GEMMA3 = Architecture(Gemma3Config, Gemma3Config.from_dict, "transom.llm.model.gemma3", "Gemma3ForCausalLM")
ARCHITECTURES: Mapping[str, Architecture] = {
    "mimo_v2": _MIMO_V2,
    "mimo_v2_flash": _MIMO_V2,
    "gemma3_text": _GEMMA3,
}


def read_config(folder: str | Path) -> DecoderConfig:
    """Read `folder/config.json`. Raise ConfigError when it is unusable or no served architecture's."""
    return config_from_dict(read_json(folder))


def config_from_dict(raw: Mapping[str, Any]) -> DecoderConfig:
    """Build from a parsed config.json. Raise ConfigError naming the key and its value."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        listed = ", ".join(repr(name) for name in ARCHITECTURES)
        raise ConfigError(f"model_type = {kind!r} is not supported; allowed: {listed}")
    return ARCHITECTURES[kind].read(raw)


def new_model(config: DecoderConfig) -> CausalLM:
    """Build the model of a config, with parameters that hold nothing useful yet."""
    for architecture in ARCHITECTURES.values():
        if isinstance(config, architecture.config):
            model: CausalLM = getattr(import_module(architecture.module), architecture.name)(config)
            return model
    raise AssertionError(f"no architecture has a {type(config).__name__}")
