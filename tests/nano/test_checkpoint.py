"""The committed checkpoint has the real format, fits its limits, and answers truthfully."""

from __future__ import annotations

import functools
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from transom.encoder.expand import Expander
from transom.nano.data import dialogues, images, sounds, texts, videos
from transom.nano.data.dialogues import Media, assistant, user
from transom.nano.data.sounds import SpokenDigits
from transom.nano.evaluate import Nano
from transom.nano.export import CHECKPOINT, TEMPLATE
from transom.nano.prompts import PromptWriter
from transom.nano.tokenizer import MARKUP_TOKENS, SPECIAL_TOKENS
from transom.tokenizer import Tokenizer

MAX_BYTES = 25_000_000
MAX_PARAMETERS = 10_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(CHECKPOINT)


@functools.cache
def shared_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(CHECKPOINT)


@functools.cache
def nano() -> Nano:
    torch.set_num_threads(1)
    return Nano(CHECKPOINT)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_size_and_parameters_stay_within_their_limits() -> None:
    assert sum(path.stat().st_size for path in files(CHECKPOINT)) <= MAX_BYTES
    parameters = 0
    for path in CHECKPOINT.rglob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            parameters += sum(int(np.prod(tensors.get_slice(key).get_shape())) for key in tensors.keys())  # noqa: SIM118
    assert 1_000_000 < parameters <= MAX_PARAMETERS


def test_config_has_what_the_model_promises() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["MiMoV2ForCausalLM"]
    assert config["num_hidden_layers"] >= 8
    assert config["hybrid_layer_pattern"].count(0) >= 3
    assert config["num_key_value_heads"] != config["swa_num_key_value_heads"]
    assert (config["sliding_window"], config["n_routed_experts"], config["num_experts_per_tok"]) == (32, 8, 2)
    assert config["moe_layer_freq"][0] == 0
    assert config["num_nextn_predict_layers"] == 3
    assert set(config["vision_config"]["vit_window_attn_types"]) == {-1, 0, 1}


def test_template_in_the_checkpoint_is_the_source() -> None:
    assert (CHECKPOINT / "chat_template.jinja").read_text() == TEMPLATE.read_text()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_tokenizer_round_trips_any_text(text: str) -> None:
    known = shared_tokenizer()
    normal = unicodedata.normalize("NFC", text)
    assert known.decode(known.encode(text, special=False), skip_special=False) == normal


def test_digits_and_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert all(len(tokenizer.encode(digit)) == 1 for digit in "0123456789")
    assert len(tokenizer.encode("2048")) == 4
    for name in (*SPECIAL_TOKENS, *MARKUP_TOKENS):
        assert tokenizer.encode(name) == [tokenizer.token_id(name)]
    assert tokenizer.eos_ids == (tokenizer.token_id("<|im_end|>"),)


def test_template_places_media_in_the_order_of_the_parts(tokenizer: Tokenizer) -> None:
    content = [
        {"type": "text", "text": "A"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "text", "text": "B"},
    ]
    assert tokenizer.render_chat([{"role": "user", "content": content}]) == (
        "<|im_start|>system\nYou are Nano.<|im_end|><|im_start|>user\nA"
        "<|vision_start|><|image_pad|><|vision_end|><|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>"
        "<|mimo_video_start|><|video_pad|><|mimo_video_end|>B<|im_end|><|im_start|>assistant\n<think></think>"
    )


def test_template_writes_tools_calls_and_results(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    call = {"function": {"name": "clock", "arguments": {"zone": "UTC", "digits": 2}}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "easy"},
    ]
    text = tokenizer.render_chat(messages, tools=[tool], add_generation_prompt=True, enable_thinking=True)
    assert text == (
        "<|im_start|>system\nBe short.\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "clock", "parameters": {}}}\n'
        "</tools>\nCall a tool as <tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>"
        "\n</function>\n</tool_call><|im_end|><|im_start|>user\nTime?<|im_end|><|im_start|>assistant\n<think></think>"
        "<tool_call>\n<function=clock>\n<parameter=zone>UTC</parameter>\n<parameter=digits>2</parameter>\n</function>\n"
        "</tool_call><|im_end|><|im_start|>tool\n<tool_response>\n12:00\n</tool_response>\n<|im_end|>"
        "<|im_start|>assistant\n<think>easy</think>Noon.<|im_end|><|im_start|>assistant\n"
    )


def test_prompts_mark_answers_and_expand_media(tokenizer: Tokenizer) -> None:
    item = Media("image", images.ImageFacts("plain", "red"), 9)
    writer = PromptWriter(CHECKPOINT, lambda expander, media: expander.image(media.content))
    rng = np.random.default_rng(0)
    prompt = writer.write([user(rng, [item], "What?"), assistant("Plain red.")])
    (start, end), *rest = prompt.answers
    assert not rest
    assert tokenizer.decode(prompt.ids[start:end], skip_special=False) == "Plain red.<|im_end|>"
    assert prompt.ids.count(writer.ids.image_pad) == 9
    expander = Expander.from_folder(CHECKPOINT)
    picture = expander.image(9)
    first = prompt.ids.index(writer.ids.vision_start)
    assert prompt.ids[first : first + 11] == picture


def share_right(asked: list[list[dialogues.Message]], pools: object) -> float:
    verdicts = nano().right_answers(asked, pools)  # type: ignore[arg-type]
    return sum(verdicts) / len(verdicts)


def test_answers_about_pictures_stay_above_the_floor() -> None:
    rng, builder = np.random.default_rng(77), nano().builder(SpokenDigits([]))
    entries = builder.images(lambda r: images.shapes_picture(r, count=1), 40, rng)
    entries += builder.images(images.printed_digit_picture, 20, rng)
    pools = builder.pools(entries, [], [])
    asked = [
        [
            user(rng, [Media("image", e.facts, e)], "What is in this picture?"),
            assistant(dialogues.describe(e.facts)),
        ]
        for e in entries
    ]
    assert share_right(asked, pools) >= PICTURE_FLOOR


def test_answers_about_single_tones_stay_above_the_floor() -> None:
    rng, builder = np.random.default_rng(78), nano().builder(SpokenDigits([]))
    heard = builder.sounds(lambda r: sounds.tones_sound(r, count=1), 30, rng)
    pools = builder.pools([], heard, [])
    items = [Media("audio", e.facts, e) for e in heard]
    asked = [[user(rng, [item], ""), assistant(dialogues.describe(item.facts))] for item in items]
    assert share_right(asked, pools) >= TONE_FLOOR


def test_it_names_what_moves_in_a_video() -> None:
    rng, builder = np.random.default_rng(79), nano().builder(SpokenDigits([]))
    clips = [builder.video(videos.motion_video(rng, "up"), rng, 0.0) for _ in range(8)]
    pools = builder.pools([], [], clips)
    answers = [
        nano().answer([user(rng, [Media("video", clip.facts, clip)], "What happens?")], pools)
        for clip in clips
    ]
    named = [f"{clip.facts.colour} {clip.facts.shape}" in answer for clip, answer in zip(clips, answers)]
    assert sum(named) >= 6


def test_it_says_who_it_is_token_by_token() -> None:
    pools = nano().builder(SpokenDigits([])).pools([], [], [])
    assert nano().answer([{"role": "user", "content": "Who are you?"}], pools) == texts.WHO


PICTURE_FLOOR = 0.8
TONE_FLOOR = 0.8
