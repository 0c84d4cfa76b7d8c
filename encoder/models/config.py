"""Configuration of the vision tower, the audio path and their preprocessing, read from a checkpoint.

Used by the encoder process. Field names are the hub's; every number of the models comes from here.
Knows nothing of tensors, devices or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from transom.encoder.models.hub_json import FromMapping, check_positive, read_json, read_section, reject

SinkMode = Literal["first_key", "denominator"]
FULL, ROWS, COLUMNS = -1, 0, 1


@dataclass(frozen=True, kw_only=True)
class VisionConfig(FromMapping):
    """The vision tower; the defaults are the released V2.5 model's.

    `qk_channels` and `kv_channels` are the head sizes of queries/keys and values: the width of the
    attention is independent of `hidden_size`. A block's sinks act as `sink_mode` says: "first_key"
    adds them to the logit of the segment's key 0 where the window shows it, "denominator" adds
    `exp(sink)` to the softmax's denominator.
    """

    section = "vision_config"

    depth: int = 28
    hidden_size: int = 1280
    intermediate_size: int = 4608
    out_hidden_size: int = 4096
    num_heads: int = 32
    num_key_value_heads: int = 8
    qk_channels: int = 64
    kv_channels: int = 64
    in_chans: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    fullatt_block_indexes: tuple[int, ...] = ()
    vit_window_attn_types: tuple[int, ...] = ()
    visual_token_window_size: int = 64
    use_sink: bool = True
    sink_mode: SinkMode = "first_key"
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    projection_hidden_size: int | None = None

    def __post_init__(self) -> None:
        where = self.section
        check_positive(
            where,
            self,
            "depth hidden_size intermediate_size out_hidden_size num_heads kv_channels "
            "num_key_value_heads in_chans patch_size temporal_patch_size spatial_merge_size "
            "visual_token_window_size",
        )
        if self.num_heads % self.num_key_value_heads:
            raise reject(
                where, "num_key_value_heads", self.num_key_value_heads, f"a divisor of {self.num_heads}"
            )
        if self.qk_channels % 4 or self.qk_channels <= 0:
            raise reject(where, "qk_channels", self.qk_channels, "a positive multiple of 4")
        if self.hidden_act != "silu":
            raise reject(where, "hidden_act", self.hidden_act, "'silu'")
        if self.sink_mode not in ("first_key", "denominator"):
            raise reject(where, "sink_mode", self.sink_mode, "'first_key' or 'denominator'")
        types = self.vit_window_attn_types
        if len(types) != self.depth or not set(types) <= {FULL, ROWS, COLUMNS}:
            raise reject(where, "vit_window_attn_types", types, f"{self.depth} values out of -1, 0, 1")
        if not all(0 <= index < self.depth for index in self.fullatt_block_indexes):
            raise reject(
                where, "fullatt_block_indexes", self.fullatt_block_indexes, f"below depth {self.depth}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read hub spelling; a config without window types has full attention everywhere."""
        known = dict(data)
        if "in_channels" in known:
            known.setdefault("in_chans", known["in_channels"])
        depth = cls._convert("depth", "int", known.get("depth", cls.depth))
        known.setdefault("fullatt_block_indexes", ())
        if not known.get("vit_window_attn_types"):
            known["vit_window_attn_types"] = (FULL,) * depth
        return super().from_dict(known)

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read `vision_config` of a checkpoint folder's config.json."""
        return cls.from_dict(read_section(Path(path), cls.section))

    @property
    def merge_unit(self) -> int:
        """Patches per LLM token."""
        return self.spatial_merge_size**2

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch: channels, time, height, width."""
        return self.in_chans * self.temporal_patch_size * self.patch_size**2

    def is_full(self, block: int) -> bool:
        """Whether a block sees the whole segment; only the others have a window and sinks."""
        return block in self.fullatt_block_indexes


@dataclass(frozen=True, kw_only=True)
class MelConfig(FromMapping):
    """The log-mel front end (part of audio_tokenizer/config.json)."""

    section = "audio_tokenizer"

    sampling_rate: int = 24000
    nfft: int = 960
    window_size: int = 960
    hop_length: int = 240
    n_mels: int = 128
    fmin: float = 0.0
    fmax: float | None = None
    log_clip: float = 1e-7

    def __post_init__(self) -> None:
        check_positive(
            self.section,
            self,
            "sampling_rate nfft window_size hop_length n_mels log_clip",
        )
        if self.window_size > self.nfft:
            raise reject(self.section, "window_size", self.window_size, f"at most nfft {self.nfft}")
        if not 0 <= self.fmin < self.top_hz:
            raise reject(self.section, "fmin", self.fmin, f"from 0 to below {self.top_hz}")

    @property
    def top_hz(self) -> float:
        """Upper edge of the highest mel band."""
        return self.sampling_rate / 2 if self.fmax is None else self.fmax


@dataclass(frozen=True, kw_only=True)
class TokenizerEncoderConfig(FromMapping):
    """The audio tokenizer's encoder and quantiser (audio_tokenizer/config.json).

    `encoder_attn_window_size` is (frames back, frames ahead), negative for no limit; with
    `hybrid_attention` only the first `swa_per_block - 1` of every `swa_per_block` layers have it.
    `bidirectional` switches to the other public reading: no mask in any layer.
    `encoder_skip_layer_id` counts from 1: the output of layer index `id - 1` is added at the end.
    """

    section = "audio_tokenizer"

    d_model: int = 1024
    encoder_layers: int = 24
    encoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    encoder_skip_layer_id: int | None = 3
    encoder_causal: bool = True
    encoder_attn_window_size: tuple[int, ...] = (128, 0)
    hybrid_attention: bool = True
    swa_per_block: int = 2
    bidirectional: bool = False
    kernel_size: int = 3
    stride_size: int = 2
    avg_pooler: int = 2
    scale_embedding: bool = False
    activation_function: str = "gelu"
    ln_type: str = "LayerNorm"
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    n_mels: int = 128
    num_quantizers: int = 20
    codebook_size: tuple[int, ...] = (1024, 1024, 256, *([128] * 17))

    def __post_init__(self) -> None:
        where = self.section
        check_positive(
            where,
            self,
            "d_model encoder_layers encoder_attention_heads encoder_ffn_dim swa_per_block "
            "stride_size avg_pooler n_mels num_quantizers layer_norm_eps rope_theta",
        )
        if self.d_model % (2 * self.encoder_attention_heads):
            raise reject(
                where, "d_model", self.d_model, f"a multiple of 2 x {self.encoder_attention_heads} heads"
            )
        if self.kernel_size != 3:
            raise reject(where, "kernel_size", self.kernel_size, "3")
        if self.activation_function != "gelu":
            raise reject(where, "activation_function", self.activation_function, "'gelu'")
        if self.ln_type != "LayerNorm":
            raise reject(where, "ln_type", self.ln_type, "'LayerNorm'")
        if len(self.encoder_attn_window_size) != 2:
            raise reject(where, "encoder_attn_window_size", self.encoder_attn_window_size, "two numbers")
        skip = self.encoder_skip_layer_id
        if skip is not None and not 1 <= skip <= self.encoder_layers:
            raise reject(where, "encoder_skip_layer_id", skip, f"null or 1 to {self.encoder_layers}")
        if len(self.codebook_size) != self.num_quantizers or min(self.codebook_size) < 1:
            raise reject(where, "codebook_size", self.codebook_size, f"{self.num_quantizers} positive sizes")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read hub spelling; one codebook size, or too few, stand for all further codebooks."""
        known = dict(data)
        sizes = cls._convert("codebook_size", "tuple", known.get("codebook_size", cls.codebook_size))
        if not sizes:
            raise reject(cls.section, "codebook_size", sizes, "at least one size")
        count = cls._convert("num_quantizers", "int", known.get("num_quantizers", len(sizes)))
        known["num_quantizers"] = count
        known["codebook_size"] = (sizes + sizes[-1:] * count)[:count]
        return super().from_dict(known)

    def window(self, layer: int) -> tuple[int | None, int | None]:
        """Frames that a layer sees back and ahead; None is no limit."""
        if self.bidirectional:
            return None, None
        back: int | None = None
        ahead: int | None = None
        if not self.hybrid_attention or layer % self.swa_per_block < self.swa_per_block - 1:
            left, right = self.encoder_attn_window_size
            back, ahead = (left if left >= 0 else None), (right if right >= 0 else None)
        return back, 0 if self.encoder_causal else ahead


@dataclass(frozen=True, kw_only=True)
class AudioConfig(FromMapping):
    """Speech embeddings, group encoder and projection (`audio_config`), with the tokenizer's parts."""

    section = "audio_config"

    out_hidden_size: int = 4096
    audio_channels: int = 20
    audio_segment_size: int = 6000
    group_size: int = 4
    input_full_attention: bool = True
    input_local_dim: int = 1024
    input_local_layers: int = 6
    input_local_attn_heads: int = 16
    input_local_head_dim: int = 64
    input_local_intermediate_size: int = 4096
    add_post_norm: bool = True
    partial_rotary_factor: float = 1.0
    projection_layers: int = 2
    projection_hidden_size: int | None = None
    rope_theta: float = 640000.0
    rms_norm_eps: float = 1e-6
    speech_vocab_size: tuple[int, ...] = (1280,)
    mel: MelConfig = field(default_factory=MelConfig)
    tokenizer: TokenizerEncoderConfig = field(default_factory=TokenizerEncoderConfig)

    def __post_init__(self) -> None:
        where = self.section
        check_positive(
            where,
            self,
            "out_hidden_size audio_channels audio_segment_size group_size input_local_dim "
            "input_local_layers input_local_attn_heads input_local_intermediate_size",
        )
        if self.projection_layers != 2:
            raise reject(where, "projection_layers", self.projection_layers, "2")
        if self.input_local_head_dim % 2 or self.input_local_head_dim <= 0:
            raise reject(where, "input_local_head_dim", self.input_local_head_dim, "positive and even")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim % 2:
            raise reject(where, "partial_rotary_factor", self.partial_rotary_factor, "in (0, 1], even dims")
        if self.audio_channels > self.tokenizer.num_quantizers:
            raise reject(where, "audio_channels", self.audio_channels, f"<= {self.tokenizer.num_quantizers}")
        if self.mel.n_mels != self.tokenizer.n_mels:
            raise reject(
                "audio_tokenizer", "n_mels", self.tokenizer.n_mels, f"{self.mel.n_mels} as in the mel"
            )
        frames = self.frames_per_token
        if self.audio_segment_size % frames:
            raise reject(where, "audio_segment_size", self.audio_segment_size, f"a multiple of {frames}")
        for channel, size in enumerate(self.tokenizer.codebook_size[: self.audio_channels]):
            if self.speech_vocab(channel) < size:
                raise reject(where, "speech_vocab_size", self.speech_vocab_size, f">= codebook size {size}")

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read `audio_config` and audio_tokenizer/config.json of a checkpoint folder."""
        tokenizer = read_json(Path(path) / "audio_tokenizer" / "config.json")
        return cls.from_dicts(read_section(Path(path), cls.section), tokenizer)

    @classmethod
    def from_dicts(cls, audio: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Self:
        """Build from the two parsed JSON objects."""
        parts = {
            "mel": MelConfig.from_dict(tokenizer),
            "tokenizer": TokenizerEncoderConfig.from_dict(tokenizer),
        }
        return cls.from_dict({**audio, **parts})

    def speech_vocab(self, channel: int) -> int:
        """Rows of a channel's speech embedding."""
        return self.speech_vocab_size[min(channel, len(self.speech_vocab_size) - 1)]

    @property
    def frames_per_token(self) -> int:
        """Mel frames behind one LLM token."""
        return self.tokenizer.stride_size * self.tokenizer.avg_pooler * self.group_size

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that rotate."""
        return int(self.input_local_head_dim * self.partial_rotary_factor)

    @property
    def projection_dim(self) -> int:
        """Width between the two projection layers (16384 for 4096 in the released model)."""
        return self.projection_hidden_size or 4 * self.group_size * self.input_local_dim

    def tokens(self, mel_frames: int) -> int:
        """LLM tokens of an item with so many mel frames."""
        full, rest = divmod(mel_frames, self.audio_segment_size)
        per_token = self.frames_per_token
        return full * (self.audio_segment_size // per_token) + -(-rest // per_token)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig(FromMapping):
    """Sizes and sampling limits of preprocessing (`processor_config`)."""

    section = "processor_config"

    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    image_min_pixels: int = 8192
    image_max_pixels: int = 8388608
    video_min_pixels: int = 8192
    video_max_pixels: int = 8388608
    video_total_max_pixels: int = 268435456
    fps: float = 1.0
    min_frames: int = 8
    max_frames: int = 3600
    max_aspect_ratio: float = 200.0
    interpolation: str = "bilinear"
    antialias: bool = False
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        where = self.section
        check_positive(
            where,
            self,
            "patch_size merge_size temporal_patch_size image_min_pixels video_min_pixels "
            "video_total_max_pixels fps min_frames max_frames",
        )
        for kind in ("image", "video"):
            low, high = getattr(self, f"{kind}_min_pixels"), getattr(self, f"{kind}_max_pixels")
            if high < max(low, self.factor**2):
                raise reject(where, f"{kind}_max_pixels", high, f">= {max(low, self.factor**2)}")
        if self.min_frames > self.max_frames:
            raise reject(where, "min_frames", self.min_frames, f"<= max_frames {self.max_frames}")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise reject(where, "interpolation", self.interpolation, "'bilinear' or 'bicubic'")
        if len(self.image_mean) != 3 or len(self.image_std) != 3 or min(self.image_std) <= 0:
            raise reject(where, "image_std", self.image_std, "three positive numbers, as many as image_mean")

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read `processor_config` of a checkpoint folder; its patches must be the vision tower's."""
        cfg = cls.from_dict(read_section(Path(path), cls.section))
        vision = VisionConfig.from_folder(path)
        ours = (cfg.patch_size, cfg.merge_size, cfg.temporal_patch_size)
        theirs = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        if ours != theirs:
            raise reject(cls.section, "patch, merge, temporal size", ours, f"{theirs} as in vision_config")
        return cfg

    @classmethod
    def _convert(cls, name: str, kind: str, value: Any) -> Any:
        if name in ("image_mean", "image_std"):
            try:
                return tuple(float(part) for part in value)
            except (TypeError, ValueError):
                raise reject(cls.section, name, value, "three numbers") from None
        if value is None:
            return cls.__dataclass_fields__[name].default
        return super()._convert(name, kind, value)

    @property
    def factor(self) -> int:
        """Pixels that both sides of a resized picture are multiples of."""
        return self.patch_size * self.merge_size
