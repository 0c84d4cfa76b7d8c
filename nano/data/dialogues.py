"""Whole dialogues by seed: text, one media item, several, and follow-up questions about earlier ones.

Used by training and evaluation. Media come from a `MediaSource`, so that the same dialogue can carry
cached embeddings or real files; knows nothing of tokens or the chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from transom.nano.data import answers, texts
from transom.nano.data.answers import audio_phrase, image_phrase, loosely, pick, sentence
from transom.nano.data.facts import FASHION, AudioFacts, ImageFacts, VideoFacts

Rng = np.random.Generator
Message = dict[str, Any]
Facts = ImageFacts | AudioFacts | VideoFacts


@dataclass(frozen=True)
class Media:
    """One item: what is true of it, and whatever the source needs to find its content again."""

    modality: Literal["image", "audio", "video"]
    facts: Facts
    content: Any


class MediaSource(Protocol):
    """Draws media items of any kind."""

    def image(self, rng: Rng, kind: str | None = None) -> Media:
        """Draw a picture, of one kind if asked."""
        ...

    def audio(self, rng: Rng) -> Media:
        """Draw a sound."""
        ...

    def video(self, rng: Rng) -> Media:
        """Draw a video, with or without sound."""
        ...


PART_TYPES = {"image": "image_url", "audio": "input_audio", "video": "video_url"}


def media_part(media: Media) -> dict[str, Any]:
    """Return the content part that stands for an item; `media` is for whoever embeds it."""
    return {"type": PART_TYPES[media.modality], "media": media}


def user(rng: Rng, items: Sequence[Media], text: str) -> Message:
    """Return a user message: items mostly before the text, seldom behind it."""
    parts = [media_part(item) for item in items]
    if not text:
        return {"role": "user", "content": parts}
    written = {"type": "text", "text": text}
    return {"role": "user", "content": [written, *parts] if rng.random() < 0.3 else [*parts, written]}


def assistant(text: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": text}


def describe(facts: Facts) -> str:
    """Answer an open question about any item."""
    if isinstance(facts, ImageFacts):
        return answers.describe_image(facts)
    return answers.describe_audio(facts) if isinstance(facts, AudioFacts) else answers.describe_video(facts)


def ask(facts: Facts, rng: Rng) -> tuple[str, str]:
    """Draw a question about any item and its answer; one time in eight there is no question."""
    if rng.random() < 0.12:
        return "", describe(facts)
    if isinstance(facts, ImageFacts):
        return answers.ask_image(facts, rng)
    return answers.ask_audio(facts, rng) if isinstance(facts, AudioFacts) else answers.ask_video(facts, rng)


def text_dialogue(rng: Rng) -> list[Message]:
    """Draw a dialogue without media."""
    messages = []
    for asked, answer in texts.conversation(rng):
        messages += [{"role": "user", "content": asked}, assistant(answer)]
    return _with_system(messages, rng)


def recall_dialogue(rng: Rng, filler_chars: int) -> list[Message]:
    """Draw a question about a fact that stands somewhere in a long text."""
    asked, answer = texts.recall(rng, filler_chars, int(rng.integers(1, 4)))
    return _with_system([{"role": "user", "content": asked}, assistant(answer)], rng)


def recall_lesson(rng: Rng, filler_chars: int) -> list[Message]:
    """Draw questions about several facts of one long text: an answer costs little once the text is read."""
    messages: list[Message] = []
    for asked, answer in texts.recall_all(rng, filler_chars, int(rng.integers(1, 7))):
        messages += [{"role": "user", "content": asked}, assistant(answer)]
    return _with_system(messages, rng)


def media_dialogue(source: MediaSource, rng: Rng, modality: str) -> list[Message]:
    """Draw a question about one item, at times with small talk before it or a follow-up."""
    item = (
        source.image(rng)
        if modality == "image"
        else source.audio(rng)
        if modality == "audio"
        else source.video(rng)
    )
    asked, answer = ask(item.facts, rng)
    messages: list[Message] = []
    if rng.random() < 0.08:
        said, reply = texts.small_talk(rng)
        messages = [{"role": "user", "content": said}, assistant(reply)]
    messages += [user(rng, [item], asked), assistant(answer)]
    if rng.random() < 0.22:
        if rng.random() < 0.3:
            said, reply = texts.small_talk(rng)
            messages += [{"role": "user", "content": said}, assistant(reply)]
        asked, answer = ask(item.facts, rng)
        if asked:
            messages += [{"role": "user", "content": asked}, assistant(answer)]
    return _with_system(messages, rng)


def pair_dialogue(source: MediaSource, rng: Rng) -> list[Message]:
    """Draw a question about two items."""
    roll = rng.random()
    if roll < 0.55:
        return _with_system(_two_images(source, rng), rng)
    if roll < 0.85:
        return _with_system(_image_and_audio(source, rng), rng)
    first, second = source.audio(rng), source.audio(rng)
    asked = pick(rng, ("What are these sounds?", "What do you hear in each?", "Describe both sounds.", ""))
    answer = sentence(f"first {audio_phrase(_audio(first))}, then {audio_phrase(_audio(second))}")
    return _with_system([user(rng, [first, second], asked), assistant(answer)], rng)


def _image(media: Media) -> ImageFacts:
    assert isinstance(media.facts, ImageFacts)
    return media.facts


def _audio(media: Media) -> AudioFacts:
    assert isinstance(media.facts, AudioFacts)
    return media.facts


def _two_images(source: MediaSource, rng: Rng) -> list[Message]:
    first, second = source.image(rng), source.image(rng)
    one, two = image_phrase(_image(first)), image_phrase(_image(second))
    both = sentence(f"first {one}, then {two}")
    style = rng.random()
    if style < 0.45 or one == two:
        asked = pick(
            rng,
            (
                "What are these?",
                "What is in these pictures?",
                "Describe both pictures.",
                "What do you see?",
                "",
            ),
        )
        return [user(rng, [first, second], loosely(asked, rng)), assistant(both)]
    if style < 0.75:
        wanted = int(rng.integers(2))
        asked = pick(
            rng,
            ("Which picture shows {}?", "Which image shows {}?", "Where is {}: in the first or the second?"),
        )
        answer = ("The first picture.", "The second picture.")[wanted]
        return [user(rng, [first, second], loosely(asked.format((one, two)[wanted]), rng)), assistant(answer)]
    turns = [
        user(rng, [first], ""),
        assistant(describe(first.facts)),
        user(rng, [second], pick(rng, ("And this?", "And now?", ""))),
    ]
    turns.append(assistant(describe(second.facts)))
    if rng.random() < 0.6:
        place = int(rng.integers(2))
        asked = f"What was in the {('first', 'second')[place]} picture?"
        turns += [{"role": "user", "content": asked}, assistant(sentence((one, two)[place]))]
    return turns


def _image_and_audio(source: MediaSource, rng: Rng) -> list[Message]:
    picture, sound = source.image(rng, "digit" if rng.random() < 0.4 else None), source.audio(rng)
    seen, heard = _image(picture), _audio(sound)
    items = [picture, sound] if rng.random() < 0.6 else [sound, picture]
    if seen.kind == "digit" and heard.kind == "digits" and len(heard.digits) == 1 and rng.random() < 0.6:
        same = seen.label == str(heard.digits[0])
        answer = (
            "Yes." if same else f"No, the picture shows {seen.label} and the sound says {heard.digits[0]}."
        )
        asked = pick(
            rng, ("Is it the same digit?", "Do they show the same digit?", "Are both the same digit?")
        )
        return [user(rng, items, loosely(asked, rng)), assistant(answer)]
    style = rng.random()
    if style < 0.5:
        asked = pick(rng, ("What do you see and hear?", "Describe both.", "What are these?", ""))
        return [
            user(rng, items, asked),
            assistant(f"Picture: {image_phrase(seen)}. Sound: {audio_phrase(heard)}."),
        ]
    if style < 0.75:
        return [
            user(rng, items, pick(rng, ("What is in the picture?", "What do you see?"))),
            assistant(describe(seen)),
        ]
    return [
        user(rng, items, pick(rng, ("What is the sound?", "What do you hear?"))),
        assistant(describe(heard)),
    ]


def _with_system(messages: list[Message], rng: Rng) -> list[Message]:
    line = texts.system_line(rng)
    return messages if line is None else [{"role": "system", "content": line}, *messages]


def corpus(seed: int, size: int) -> list[str]:
    """Return texts that look like what the model reads and writes, to train a tokenizer on."""
    from transom.nano.data import images, sounds, videos

    rng = np.random.default_rng(seed)
    written: list[str] = ["system", "user", "assistant", "tool", "\n"] * (size // 8)
    for _ in range(size):
        written += [part for turn in texts.conversation(rng) for part in turn]
        written.append(texts.filler_sentence(rng))
    drawn: list[Facts] = []
    for _ in range(size // 4):
        kinds = (images.shapes_picture, images.word_picture, images.plain_picture)
        drawn += [
            kinds[int(rng.integers(3))](rng)[1],
            videos.any_video(rng).facts,
            sounds.tones_sound(rng).facts,
        ]
    for facts in drawn:
        written += ask(facts, rng)
    written += [answers.sentence(name) for name in FASHION] * (size // 100)
    return [f" {text}" if index % 2 else text for index, text in enumerate(written)]
