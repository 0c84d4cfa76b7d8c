"""The generators are functions of their seed, and what they say about their media is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transom.encoder.media.sampling import sample_frames
from transom.encoder.models.config import ProcessorConfig
from transom.nano.data import answers, images, sounds, texts, videos
from transom.nano.data.facts import PITCHES, ImageFacts, Shape, VideoFacts
from transom.nano.export import CHECKPOINT
from transom.nano.videofile import through_h264

IMAGES = [
    images.shapes_picture,
    images.plain_picture,
    images.word_picture,
    images.printed_digit_picture,
    images.unknown_picture,
]


@pytest.mark.parametrize("draw", IMAGES, ids=lambda draw: draw.__name__)
def test_pictures_repeat_by_seed(draw: Callable[[np.random.Generator], tuple[Any, ImageFacts]]) -> None:
    first, second, other = (draw(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]
    assert first[0].shape != other[0].shape or not np.array_equal(first[0], other[0])
    assert first[0].dtype == np.uint8
    assert first[0].shape[2] == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_shape_stands_where_its_facts_say(seed: int) -> None:
    pixels, facts = images.shapes_picture(np.random.default_rng(seed), count=1)
    (shape,) = facts.shapes
    height, width = pixels.shape[:2]
    centre = pixels[int(shape.y * height), int(shape.x * width)].astype(int)
    corners = [pixels[0, 0], pixels[0, -1], pixels[-1, 0], pixels[-1, -1]]
    assert max(np.abs(centre - corner.astype(int)).sum() for corner in corners) > 60


def test_sounds_repeat_by_seed_and_label_disjoint_spans() -> None:
    for seed in range(10):
        first, second = (sounds.tones_sound(np.random.default_rng(seed)) for _ in range(2))
        assert np.array_equal(first.samples, second.samples)
        assert len(first.spans) == first.facts.count
        ends = [0, *(end for _, end, _ in first.spans)]
        assert all(start >= end for (start, _, _), end in zip(first.spans, ends))
        assert ends[-1] <= len(first.samples)


@pytest.mark.parametrize("pitch", list(PITCHES))
def test_a_tone_has_the_pitch_it_is_named_after(pitch: str) -> None:
    sound = sounds.tones_sound(np.random.default_rng(3), pitch, 1)
    start, end, _ = sound.spans[0]
    spectrum = np.abs(np.fft.rfft(sound.samples[start:end]))
    hertz = spectrum.argmax() * sounds.RATE / (end - start)
    low, high = PITCHES[pitch]
    assert low * 0.97 <= hertz <= high * 1.03


def test_spoken_digits_join_in_order() -> None:
    rng = np.random.default_rng(1)
    voices = [np.full(800, 0.1 * (i + 1), np.float32) for i in range(3)]
    sound = sounds.digits_sound(voices, [4, 0, 9], rng, varied=False)
    assert sound.facts.digits == (4, 0, 9)
    assert [label - sounds.DIGIT_BASE for _, _, label in sound.spans] == [4, 0, 9]
    for (start, end, _), level in zip(sound.spans, (0.1, 0.2, 0.3)):
        assert float(sound.samples[start + 600 : end - 600].mean()) == pytest.approx(level, rel=0.02)


@pytest.mark.parametrize(
    ("direction", "axis", "sign"),
    [("to the right", 1, 1), ("to the left", 1, -1), ("up", 0, -1), ("down", 0, 1)],
)
def test_motion_goes_the_way_its_facts_say_even_after_h264(direction: str, axis: int, sign: int) -> None:
    video = through_h264(videos.motion_video(np.random.default_rng(4), direction))
    places = []
    for second in (0.0, video.duration_s * 0.9):
        frame = video.frame(second).astype(int)
        places.append(np.argwhere(np.abs(frame - frame[0, 0]).sum(-1) > 60).mean(0)[axis])
    assert (places[1] - places[0]) * sign > 10


def test_order_videos_show_each_scene_from_its_second_on() -> None:
    video = videos.colours_video(np.random.default_rng(2))
    for (_, start), (_, following) in zip(video.facts.order, video.facts.order[1:]):
        assert np.array_equal(video.frame(start), video.frame(following - 0.01))
        assert not np.array_equal(video.frame(start), video.frame(following))


def test_a_listing_has_each_time_stamp_of_the_sampled_pairs_with_what_is_seen_then() -> None:
    facts = VideoFacts("colours", order=(("red", 0), ("blue", 3), ("green", 4)))
    seen = videos.as_sampled(facts, (0.0, 1.1, 2.2, 3.3, 4.4, 5.5, 6.6), 2)
    assert seen.order == (("red", 0), ("red", 2), ("green", 4), ("green", 6))
    assert answers.describe_video(seen) == "00:00 red, 00:02 red, 00:04 green, 00:06 green."
    assert videos.as_sampled(VideoFacts("motion"), (0.0, 1.0), 2).order == ()


def test_the_entries_of_sampled_pairs_miss_no_scene_of_an_order_video() -> None:
    processor = ProcessorConfig.from_folder(CHECKPOINT)
    rng = np.random.default_rng(6)
    for _ in range(150):
        video = videos.colours_video(rng)
        plan = sample_frames(
            [index / video.fps for index in range(video.frame_count)],
            fps=processor.fps,
            min_frames=processor.min_frames,
            max_frames=processor.max_frames,
            multiple=2,
        )
        listed = [name for name, _ in videos.as_sampled(video.facts, plan.timestamps, 2).order]
        changes = [name for name, before in zip(listed, ["", *listed]) if name != before]
        assert changes == [name for name, _ in video.facts.order]


def test_recall_names_the_fact_that_the_text_holds() -> None:
    for seed in range(20):
        asked, answer = texts.recall(np.random.default_rng(seed), 2000, facts=3)
        secret = answer.rstrip(".").split(" is ")[1]
        stated = answer.rstrip(".").removeprefix("The ")
        assert asked.count(stated) == 1
        assert secret
        assert 2000 <= len(asked) < 3000


def test_a_recall_lesson_asks_for_each_fact_of_its_text_once() -> None:
    for seed in range(20):
        turns = texts.recall_all(np.random.default_rng(seed), 500, 5)
        assert turns[0] == texts.recall(np.random.default_rng(seed), 500, 5)
        for asked, answer in turns:
            stated = answer.rstrip(".").removeprefix("The ")
            assert turns[0][0].count(stated) == 1
            assert stated.split(" is ")[0] in asked
        assert len({answer for _, answer in turns}) == 5


def test_descriptions_are_plain_sentences() -> None:
    red, blue = Shape("circle", "red", 0.1, 0.1), Shape("cross", "orange", 0.9, 0.5)
    assert answers.describe_image(ImageFacts("shapes", shapes=(red,))) == "A red circle."
    assert (
        answers.describe_image(ImageFacts("shapes", shapes=(red, blue)))
        == "A red circle and an orange cross."
    )
    assert answers.describe_image(ImageFacts("shapes", shapes=(blue,) * 3)) == "Three orange crosses."
    assert blue.place == "on the right"
    moving = VideoFacts("motion", "star", "orange", "up")
    assert answers.describe_video(moving) == "An orange star moves up."
    order = VideoFacts("colours", order=(("red", 0), ("blue", 64)))
    assert answers.describe_video(order) == "00:00 red, 01:04 blue."


def test_texts_repeat_by_seed() -> None:
    for seed in range(30):
        assert texts.conversation(np.random.default_rng(seed)) == texts.conversation(
            np.random.default_rng(seed)
        )
