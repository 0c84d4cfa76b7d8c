"""Questions about a media item and their true answers, from its facts.

Used by training and evaluation. `ask_*` draws a question in one of many wordings; `describe_*` is
the answer to an open question or to none. Knows nothing of pixels, prompts or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transom.nano.data.facts import NUMBERS, AudioFacts, ImageFacts, Shape, VideoFacts

Rng = np.random.Generator
Turn = tuple[str, str]

OPEN_IMAGE = (
    "What is in this picture?",
    "What is in the image?",
    "What do you see?",
    "What do you see in this picture?",
    "What is this?",
    "What's this?",
    "What's in this image?",
    "Describe this picture.",
    "Describe the image.",
    "Describe this image in one sentence.",
    "What does the picture show?",
    "What does this image show?",
    "Tell me what you see.",
    "Can you tell me what this is?",
    "Please describe the picture.",
    "Look at this. What is it?",
)
OPEN_AUDIO = (
    "What do you hear?",
    "What is this sound?",
    "What is in this recording?",
    "What is in the audio?",
    "Describe the sound.",
    "Describe this audio.",
    "Listen. What is it?",
    "What can you hear?",
    "What can be heard?",
    "What's this sound?",
    "Please describe the recording.",
    "Tell me what you hear.",
)
OPEN_VIDEO = (
    "What happens in this video?",
    "What happens in the video?",
    "What happens?",
    "Describe the video.",
    "Describe this video.",
    "What does the video show?",
    "What do you see in this video?",
    "What is in this video?",
    "What is in the clip?",
    "Tell me what happens.",
    "Please describe the clip.",
    "Watch this. What happens?",
)
UNKNOWN_IMAGE = "I don't know this picture."
UNKNOWN_AUDIO = "I don't know this sound."
UNKNOWN_VIDEO = "I don't know this video."
SILENCE = "I hear nothing."


def pick(rng: Rng, choices: Sequence[str]) -> str:
    """Draw one string."""
    return choices[int(rng.integers(len(choices)))]


def loosely(question: str, rng: Rng) -> str:
    """Write a question as people type: now and then in lower case or without its mark."""
    roll = rng.random()
    if roll < 0.1:
        return question.lower()
    if roll < 0.18:
        return question.rstrip("?.")
    return question.lower().rstrip("?.") if roll < 0.24 else question


def article(words: str) -> str:
    """Prefix the indefinite article."""
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def plural(count: int, name: str) -> str:
    """Return 'one circle', 'three crosses'."""
    ending = "" if count == 1 else "es" if name.endswith("s") else "s"
    return f"{NUMBERS[count]} {name}{ending}"


def sentence(text: str) -> str:
    """Capitalise the first letter and close with a full stop."""
    return text[0].upper() + text[1:] + "."


def _coloured(shape: Shape) -> str:
    return f"{shape.colour} {shape.name}"


def _shapes_phrase(shapes: Sequence[Shape]) -> str:
    names = [_coloured(shape) for shape in shapes]
    if len(set(names)) == 1:
        return article(names[0]) if len(names) == 1 else plural(len(names), names[0])
    return " and ".join(article(name) for name in names)


def image_phrase(facts: ImageFacts) -> str:
    """Return a noun phrase, such as 'a red circle' or 'the digit 7'."""
    if facts.kind == "shapes":
        return _shapes_phrase(facts.shapes)
    phrases = {
        "fashion": facts.label,
        "digit": f"the digit {facts.label}",
        "word": f'the word "{facts.label}"',
        "plain": f"plain {facts.label}",
        "unknown": "something I don't know",
    }
    return phrases[facts.kind]


def describe_image(facts: ImageFacts) -> str:
    """Answer an open question about a picture."""
    return UNKNOWN_IMAGE if facts.kind == "unknown" else sentence(image_phrase(facts))


def ask_image(facts: ImageFacts, rng: Rng) -> Turn:
    """Draw an open or a pointed question about a picture, and its answer."""
    if facts.kind == "unknown" or rng.random() < 0.5:
        return loosely(pick(rng, OPEN_IMAGE), rng), describe_image(facts)
    if facts.kind == "shapes":
        question, answer = _ask_shapes(facts.shapes, rng)
        return loosely(question, rng), answer
    if facts.kind == "plain":
        questions: Sequence[str] = (
            "Which colour is this?",
            "What colour is this?",
            "What colour is the picture?",
        )
        return loosely(pick(rng, questions), rng), sentence(facts.label)
    pointed = {
        "fashion": (
            "What piece of clothing is this?",
            "What clothing is this?",
            "Which item is shown?",
            "What is it?",
        ),
        "digit": (
            "Which digit is this?",
            "What digit is this?",
            "What number is this?",
            "Which number do you see?",
        ),
        "word": (
            "What does it say?",
            "Which word is this?",
            "What is written here?",
            "Read the word.",
            "Read this.",
        ),
    }
    return loosely(pick(rng, pointed[facts.kind]), rng), describe_image(facts)


def _ask_shapes(shapes: Sequence[Shape], rng: Rng) -> Turn:
    subject = shapes[int(rng.integers(len(shapes)))]
    same = len({_coloured(shape) for shape in shapes}) == 1
    style = int(rng.integers(4))
    if style == 0 and (same or len({shape.name for shape in shapes}) > 1):
        number = "" if len(shapes) == 1 or not same else "s"
        many = f"{subject.name}es" if number and subject.name == "cross" else subject.name + number
        verb = "are" if number else "is"
        asked = pick(rng, (f"What colour {verb} the {many}?", f"Which colour {verb} the {many}?"))
        return asked, sentence(subject.colour)
    if style == 1 and (same or len({shape.colour for shape in shapes}) > 1):
        asked = pick(rng, ("Which shape is {}?", "What shape is {}?", "What is {}?"))
        return asked.format(subject.colour), sentence(
            article(_coloured(subject)) if not same or len(shapes) == 1 else _shapes_phrase(shapes)
        )
    if style == 2 and (len(shapes) == 1 or not same):
        asked = pick(rng, ("Where is the {}?", "Where is the {} in the picture?"))
        return asked.format(_coloured(subject) if rng.random() < 0.6 or not same else subject.name), sentence(
            subject.place
        )
    if rng.random() < 0.5:
        return pick(
            rng, ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
        ), sentence(NUMBERS[len(shapes)])
    name = subject.name
    count = sum(shape.name == name for shape in shapes)
    many = f"{name}es" if name == "cross" else f"{name}s"
    return pick(rng, (f"How many {many} are there?", f"How many {many} do you see?")), sentence(
        NUMBERS[count]
    )


def audio_phrase(facts: AudioFacts) -> str:
    """Return a noun phrase, such as 'the digits 3, 1' or 'two high tones'."""
    if facts.kind == "digits":
        listed = ", ".join(str(digit) for digit in facts.digits)
        return f"the digit {listed}" if len(facts.digits) == 1 else f"the digits {listed}"
    if facts.kind == "tones":
        return f"a {facts.pitch} tone" if facts.count == 1 else plural(facts.count, f"{facts.pitch} tone")
    return "silence" if facts.kind == "silence" else "something I don't know"


def describe_audio(facts: AudioFacts) -> str:
    """Answer an open question about a sound."""
    if facts.kind == "digits":
        listed = ", ".join(str(digit) for digit in facts.digits)
        return f"The digit is {listed}." if len(facts.digits) == 1 else f"The digits are {listed}."
    if facts.kind == "tones":
        return sentence(audio_phrase(facts))
    return SILENCE if facts.kind == "silence" else UNKNOWN_AUDIO


def ask_audio(facts: AudioFacts, rng: Rng) -> Turn:
    """Draw an open or a pointed question about a sound, and its answer."""
    if facts.kind in ("silence", "unknown") or rng.random() < 0.5:
        return loosely(pick(rng, OPEN_AUDIO), rng), describe_audio(facts)
    if facts.kind == "digits":
        one = (
            "Which digit is said?",
            "Which digit is spoken?",
            "What number is said?",
            "What digit do you hear?",
        )
        more = (
            "Which digits are said?",
            "Which digits are spoken?",
            "What numbers are said?",
            "Write down the digits.",
        )
        both = ("What is said?", "What does the voice say?", "What does the speaker say?", "Transcribe this.")
        pointed = both if rng.random() < 0.4 else one if len(facts.digits) == 1 else more
        return loosely(pick(rng, pointed), rng), describe_audio(facts)
    if rng.random() < 0.5:
        pointed = (
            "How many tones are there?",
            "How many beeps do you hear?",
            "Count the beeps.",
            "How many tones?",
        )
        return loosely(pick(rng, pointed), rng), sentence(NUMBERS[facts.count])
    asked = pick(rng, ("Is the tone high or low?", "How high is the tone?", "Which pitch is it?"))
    return loosely(asked, rng), sentence(facts.pitch)


def _seconds(second: int) -> str:
    return f"{second // 60:02d}:{second % 60:02d}"


def _listed(facts: VideoFacts) -> str:
    """Tell what is seen at each time stamp: one look at a time is what a small model can do."""
    return sentence(", ".join(f"{_seconds(second)} {label}" for label, second in facts.order))


def describe_video(facts: VideoFacts) -> str:
    """Answer an open question about a video; its sound, if any, in a second sentence."""
    if facts.kind == "unknown":
        seen = UNKNOWN_VIDEO
    elif facts.kind == "still":
        seen = (
            f"A {facts.colour} {facts.shape} stays still."
            if facts.colour[0] not in "aeiou"
            else (f"An {facts.colour} {facts.shape} stays still.")
        )
    elif facts.kind == "motion":
        seen = sentence(f"{article(f'{facts.colour} {facts.shape}')} moves {facts.direction}")
    else:
        seen = _listed(facts)
    if facts.sound is None:
        return seen
    return f"{seen} Sound: {audio_phrase(facts.sound)}."


def ask_video(facts: VideoFacts, rng: Rng) -> Turn:
    """Draw an open or a pointed question about a video, and its answer."""
    if facts.sound is not None and rng.random() < 0.3:
        return loosely(pick(rng, OPEN_AUDIO), rng), describe_audio(facts.sound)
    if facts.kind == "unknown" or rng.random() < 0.55:
        return loosely(pick(rng, OPEN_VIDEO), rng), describe_video(facts)
    if facts.kind in ("motion", "still"):
        thing = f"{facts.colour} {facts.shape}" if rng.random() < 0.4 else facts.shape
        if rng.random() < 0.7:
            asked = pick(
                rng,
                (
                    "Where does the {} move?",
                    "Which way does the {} move?",
                    "In which direction does the {} go?",
                ),
            )
            answer = "It stays still." if facts.kind == "still" else sentence(facts.direction)
            return loosely(asked.format(thing), rng), answer
        asked = (
            pick(rng, ("What moves?", "Which shape moves?"))
            if facts.kind == "motion"
            else "Which shape is it?"
        )
        return loosely(asked, rng), sentence(article(f"{facts.colour} {facts.shape}"))
    what = "colour" if facts.kind == "colours" else "digit"
    labels = [label for label, _ in facts.order]
    style = int(rng.integers(4))
    if style == 0:
        return loosely(f"Which {what} comes first?", rng), sentence(labels[0])
    if style == 1:
        return loosely(f"Which {what} comes last?", rng), sentence(labels[-1])
    asked = pick(
        rng,
        (
            f"When does each {what} appear?",
            f"List the {what}s in order.",
            f"In which order do the {what}s come?",
        ),
    )
    return loosely(asked, rng), _listed(facts)
