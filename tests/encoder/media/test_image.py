"""Pictures of every form against Pillow, and refusals that say why."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.patience import PATIENCE_S
from transom.encoder.media.faults import PICTURE_ERRORS, picture_fault
from transom.encoder.media.image import decode_image
from transom.encoder.media.wire import ImageJob
from transom.errors import MediaError

Job = Callable[..., ImageJob]
Make = Callable[..., memoryview]


def picture(width: int = 70, height: int = 50) -> Image.Image:
    """Smooth colours that differ in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    values = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + y) % 256], -1)
    return Image.fromarray(values.astype(np.uint8))


def png_header(width: int, height: int) -> memoryview:
    """A PNG of a few bytes that claims any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return memoryview(b"\x89PNG\r\n\x1a\n" + body)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "JPEG2000"])
def test_lossless_formats_give_the_exact_pixels(kind: str, image_job: Job, make_image: Make) -> None:
    original = picture().quantize(64).convert("RGB")
    options = {"lossless": True} if kind == "WEBP" else {"irreversible": False} if kind == "JPEG2000" else {}
    decoded = decode_image(make_image(original, kind, **options), image_job())
    assert decoded.pixels.dtype == np.uint8
    np.testing.assert_array_equal(decoded.pixels, np.asarray(original))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_applied_as_pillow_does(
    kind: str, orientation: int, image_job: Job, make_image: Make
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = make_image(picture(), kind, exif=exif)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    decoded = decode_image(data, image_job())
    assert decoded.pixels.shape[:2] == wanted.size[::-1]
    assert decoded.target[0] < decoded.target[1] or orientation >= 5
    assert np.abs(decoded.pixels.astype(int) - np.asarray(wanted)).max() <= 2


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGB", "CMYK", "YCbCr"])
def test_opaque_modes_become_rgb(mode: str, image_job: Job, make_image: Make) -> None:
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    data = make_image(picture().convert(mode), kind, quality=95)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(decode_image(data, image_job()).pixels - wanted).max() <= 3


def test_transparency_shows_the_background(image_job: Job, make_image: Make) -> None:
    image = picture(40, 40).convert("RGBA")
    alpha = np.zeros((40, 40), np.uint8)
    alpha[:, 20:] = 255
    alpha[:, 10:20] = 128
    image.putalpha(Image.fromarray(alpha))
    for kind in ("PNG", "WEBP"):
        data = make_image(image, kind, lossless=True, exact=True)
        for background in ((255, 255, 255), (0, 0, 0), (10, 200, 30)):
            pixels = decode_image(data, image_job(background=background)).pixels.astype(int)
            solid = np.asarray(image)[..., :3].astype(int)
            np.testing.assert_array_equal(pixels[:, 20:], solid[:, 20:])
            np.testing.assert_array_equal(pixels[:, :10], np.broadcast_to(background, (40, 10, 3)))
            mixed = (solid[:, 10:20] * 128 + np.array(background) * 127) / 255
            assert np.abs(pixels[:, 10:20] - mixed).max() <= 1


@pytest.mark.parametrize("mode", ["LA", "L", "RGB", "P"])
def test_other_kinds_of_transparency(mode: str, image_job: Job, make_image: Make) -> None:
    image = Image.new("L", (40, 40), 7)
    image.paste(90, (20, 0, 40, 40))
    if mode == "LA":
        layered = Image.merge("LA", (image, image.point(lambda v: 255 if v == 90 else 0)))
        data = make_image(layered, "PNG")
    elif mode == "RGB":
        data = make_image(image.convert("RGB"), "PNG", transparency=(7, 7, 7))
    elif mode == "L":
        data = make_image(image, "PNG", transparency=7)
    else:
        palette = image.convert("P")
        index = palette.getpixel((0, 0))
        data = make_image(palette, "PNG", transparency=index)
    pixels = decode_image(data, image_job(background=(1, 2, 3))).pixels
    assert pixels[5, 5].tolist() == [1, 2, 3]
    assert pixels[5, 30].tolist() == [90, 90, 90]


def test_sixteen_bit_grey_is_scaled_and_not_clipped(image_job: Job, make_image: Make) -> None:
    values = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = decode_image(make_image(Image.fromarray(values), kind), image_job()).pixels
        assert np.abs(pixels[..., 1] - values / 257).max() <= 0.51


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_the_frame_asked_for(kind: str, image_job: Job, make_image: Make) -> None:
    frames = [Image.new("RGB", (40, 40), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    data = make_image(
        frames[0],
        kind,
        save_all=True,
        append_images=frames[1:],
        **({"lossless": True} if kind == "WEBP" else {}),
    )
    assert decode_image(data, image_job()).pixels[0, 0].tolist() == [250, 0, 0]
    assert decode_image(data, image_job(frame_index=2)).pixels[0, 0].tolist() == [0, 0, 250]
    with pytest.raises(MediaError, match="frame_index is 3, the image has 3 frames"):
        decode_image(data, image_job(frame_index=3))


def test_frames_on_the_way_to_one_are_bounded_by_what_they_draw(
    image_job: Job, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # the decoder sets it to the job's
    frames = [Image.new("RGB", (40, 40), (number, 0, 0)) for number in range(30)]
    data = make_image(frames[0], "GIF", save_all=True, append_images=frames[1:])
    job = image_job(max_image_pixels=2000, frame_index=20)
    assert decode_image(data, job).pixels[0, 0].tolist() == [20, 0, 0]
    with pytest.raises(MediaError, match="frame_index is 25: 41600 pixels up to it, limit 40000"):
        decode_image(data, image_job(max_image_pixels=2000, frame_index=25))


def test_a_jpeg_of_several_pictures_gives_its_first(image_job: Job, make_image: Make) -> None:
    """MPO: what phones and stereo cameras write as JPEG."""
    first, second = picture(), Image.new("RGB", (40, 30), (1, 200, 3))
    data = make_image(first, "MPO", save_all=True, append_images=[second], quality=95)
    assert Image.open(io.BytesIO(data)).format == "MPO"
    decoded = decode_image(data, image_job())
    alone = decode_image(make_image(first, "JPEG", quality=95), image_job())
    np.testing.assert_array_equal(decoded.pixels, alone.pixels)


def test_jpeg_equals_pillow_within_rounding(image_job: Job, make_image: Make) -> None:
    for subsampling in (0, 2):
        data = make_image(picture(333, 211), "JPEG", quality=90, subsampling=subsampling)
        wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
        difference = np.abs(decode_image(data, image_job()).pixels - wanted)
        assert difference.mean() < 0.5
        assert difference.max() <= 4


def test_header_bombs_are_refused_before_the_raster_exists(image_job: Job) -> None:
    with pytest.raises(MediaError, match="image of 400000000 pixels, limit 100000000"):
        decode_image(png_header(20_000, 20_000), image_job())
    with pytest.raises(MediaError, match="image of 12000x12000 = 144000000 pixels, limit 100000000"):
        decode_image(png_header(12_000, 12_000), image_job())
    with pytest.raises(MediaError, match="limit 1000"):
        decode_image(png_header(40, 40), image_job(max_image_pixels=1000))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_large_pictures_come_reduced_and_alike(kind: str, image_job: Job, make_image: Make) -> None:
    data = make_image(picture(1600, 1200), kind)
    whole = decode_image(data, image_job(max_pixels=16384))
    reduced = decode_image(data, image_job(max_pixels=16384, full_decode_pixels=1_000_000))
    assert whole.target == reduced.target
    assert whole.pixels.shape == (1200, 1600, 3)
    height, width = reduced.pixels.shape[:2]
    assert whole.target[0] <= height <= 600
    assert whole.target[1] <= width <= 800
    small = [
        np.asarray(Image.fromarray(np.ascontiguousarray(d.pixels)).resize((8, 6), Image.Resampling.BOX))
        for d in (whole, reduced)
    ]
    assert np.abs(small[0].astype(int) - small[1]).max() <= 4


def test_jpegs_are_decoded_at_a_smaller_scale_on_request(image_job: Job, make_image: Make) -> None:
    data = make_image(picture(1600, 1200), "JPEG", quality=95)
    whole = decode_image(data, image_job(max_pixels=16384))
    reduced = decode_image(data, image_job(max_pixels=16384, reduced_jpeg=True))
    assert whole.pixels.shape == (1200, 1600, 3)
    assert reduced.target == whole.target == (96, 128)
    assert reduced.pixels.shape == (150, 200, 3)  # an eighth
    small = [
        np.asarray(Image.fromarray(d.pixels).resize(d.target[::-1], Image.Resampling.BICUBIC)).astype(int)
        for d in (whole, reduced)
    ]
    difference = np.abs(small[0] - small[1])
    assert difference.mean() < 1
    assert difference.max() <= 16  # at edges that are one pixel wide
    # A picture that has no pixels to spare is decoded in full.
    assert decode_image(data, image_job(max_pixels=2**21, reduced_jpeg=True)).pixels.shape == (1200, 1600, 3)


PEAK = """
import resource, sys
from pathlib import Path
from tests.encoder.media.conftest import IMAGE_JOB
from transom.encoder.media.faults import PICTURE_ERRORS, picture_fault
from transom.encoder.media.image import decode_image
import msgspec

data = memoryview(Path(sys.argv[1]).read_bytes())
job = msgspec.structs.replace(IMAGE_JOB, max_pixels=2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decode_image(data, job)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.process
@pytest.mark.parametrize(("kind", "bytes_a_pixel"), [("JPEG", 0.5), ("PNG", 5.0)])
def test_the_memory_of_a_large_picture_is_bounded(
    kind: str, bytes_a_pixel: float, make_image: Make, tmp_path: Path
) -> None:
    pixels = 6000 * 4000
    file = tmp_path / "large"
    quick = {"compress_level": 1} if kind == "PNG" else {}
    file.write_bytes(make_image(Image.new("RGB", (6000, 4000), (90, 120, 30)), kind, **quick))
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", PEAK, str(file)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    # Pillow stores four bytes a pixel; a JPEG is never there in full.
    assert int(done.stdout) < bytes_a_pixel * pixels


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (31, 900), (2, 2)])
def test_strips_and_dots_have_a_size(size: tuple[int, int], image_job: Job, make_image: Make) -> None:
    decoded = decode_image(make_image(picture(*size), "PNG"), image_job(max_pixels=2**20))
    assert decoded.pixels.shape == (size[1], size[0], 3)
    assert decoded.target[0] % 32 == decoded.target[1] % 32 == 0


def test_extreme_aspect_is_refused(image_job: Job, make_image: Make) -> None:
    with pytest.raises(MediaError, match=r"image of 8000x33 pixels can't be used: aspect ratio 242\.4"):
        decode_image(make_image(picture(8000, 33), "PNG"), image_job())


def test_token_limit_is_told(image_job: Job, make_image: Make) -> None:
    with pytest.raises(MediaError, match="image costs 1024 tokens, limit 100"):
        decode_image(make_image(picture(1024, 1024), "PNG"), image_job(max_tokens=100))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_truncated_files_are_refused(kind: str, image_job: Job, make_image: Make) -> None:
    data = make_image(picture(300, 200), kind)
    with pytest.raises(MediaError, match="image can't be decoded"):
        decode_image(data[: len(data) * 2 // 3], image_job())


def test_jpeg_with_its_last_128_bytes_cut_is_refused(image_job: Job, make_image: Make) -> None:
    data = make_image(picture(300, 200), "JPEG")
    with pytest.raises(MediaError, match="truncated"):
        decode_image(data[:-128], image_job())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>no image here</html>", "an HTML page"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "XML or SVG"),
        (b"%PDF-1.7 ...", "a PDF"),
        (bytes(range(256)) * 4, "unknown binary data"),
        (b"just some text", "text"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "text"),
        (b"\x89PNG\r\n\x1a\n", "can't be decoded: the bytes look like a damaged PNG"),
        (b"\0\0\0\x1cftypavif" + bytes(40), "can't be decoded: the bytes look like a damaged AVIF"),
        (b"\0\0\0\x1cftypheic" + bytes(40), "the bytes look like (a damaged )?HEIC"),
    ],
)
def test_what_is_no_image_is_named(data: bytes, said: str, image_job: Job) -> None:
    with pytest.raises(MediaError, match=said):
        decode_image(memoryview(data), image_job())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("image file is truncated (8 bytes not processed)"), "its data is truncated"),
        (EOFError(), "its data is truncated"),
        (ValueError("Decompressed data too large for PngImagePlugin.MAX_TEXT_CHUNK"), "inflates to more"),
        (NotImplementedError("<PIL.TiffImagePlugin at 0x7f>"), "a variant of its format that is not read"),
        (OSError("cannot load this image"), "a variant of its format that is not read"),
        (SyntaxError("broken PNG file (chunk b'\\x00\\x00abc')"), "its data is damaged"),
        (struct.error("unpack requires a buffer of 4 bytes"), "its data is damaged"),
    ],
)
def test_faults_are_told_in_our_words(error: Exception, said: str) -> None:
    assert said in picture_fault(error)
    assert isinstance(error, PICTURE_ERRORS)
    assert not re.search(r"PIL|Plugin|0x|chunk|bytes not", picture_fault(error))


def test_random_damage_never_raises_anything_else(image_job: Job, make_image: Make) -> None:
    rng = np.random.default_rng(5)
    outcomes = set()
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "AVIF", "JPEG2000"):
        good = bytearray(make_image(picture(64, 64), kind))
        for _ in range(25):
            bad = bytearray(good)
            for position in rng.integers(0, len(bad), 6):
                bad[position] = rng.integers(0, 256)
            try:
                pixels = decode_image(memoryview(bytes(bad)), image_job()).pixels
                assert pixels.ndim == 3
                outcomes.add("decoded")
            except MediaError as error:
                outcomes.add("refused" if re.match(WORDS, error.message) else error.message)
    assert outcomes == {"decoded", "refused"}


# All that is ever said of a picture's bytes.
WORDS = (
    r"image can't be decoded: its data is (damaged|truncated)$"
    r"|image can't be decoded: its text or colour profile inflates to more than is read$"
    r"|image can't be decoded: it uses a variant of its format that is not read$"
    r"|image (can't be decoded|format is not supported): the bytes look like "
    r"|image of \d+(x\d+)?.* pixels(, limit| can't be used)"
    r"|image costs \d+ tokens, limit|image needs more memory"
)


# What the edge cases of the shared media must give: (height, width), or words of the refusal.
EDGE: dict[str, tuple[int, int] | str] = {
    "pil_broken.png": "damaged PNG",
    "pil_decompression_bomb.gif": "limit 100000000",
    "pil_hopper.psd": "Photoshop",
    "pil_png_decompression_dos.png": "inflates to more than is read",
    "pil_truncated_image.png": "truncated",
    "pil_truncated_jpeg.jpg": "truncated",
    "pil_broken_data_stream.png": "its data is damaged",
    "pil_truncated_end_chunk.png": "truncated",
    "pil_ultrahdr.jpg": "truncated",
    "tc_sigsegv.png": "can't be decoded",
    "small_heif.heif": (64, 64),
    "tc_rgba.heic": (720, 1280),
    "small_webp.webp": "can't be decoded",
    "small_jpeg.jpg": (1, 1),
    "small_png-truncated.png": (1, 1),
    "pil_tRNS_null_1x1.png": (1, 1),
    "pil_orientation_rectangle.jpg": (2, 1),
    "pil_g4_orientation_5.tif": (88, 590),
    "pil_rot1mir1.avif": (427, 640),
    "pil_pil_sample_cmyk.jpg": (100, 100),
    "pil_old-style-jpeg-compression.tif": (870, 4160),
    "tc_frame_exceeds_screen.gif": (8, 8),
    "pil_hopper_orientation_6.webp": (128, 128),
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_shared_pictures_give_pillows_pixels_or_a_reason(shared_media: Path, image_job: Job) -> None:
    files = sorted(
        f
        for folder in ("images", "images_edge", "exif_orientation")
        for f in (shared_media / folder).iterdir()
    )
    assert len(files) > 80
    for file in files:
        data = memoryview(file.read_bytes())
        wanted = EDGE.get(file.name)
        if isinstance(wanted, str):
            with pytest.raises(MediaError, match=wanted):
                decode_image(data, image_job())
            continue
        decoded = decode_image(data, image_job(max_pixels=2**23, full_decode_pixels=10**8))
        reference = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert decoded.pixels.shape == (reference.height, reference.width, 3), file.name
        if wanted is not None:
            assert decoded.pixels.shape[:2] == wanted, file.name
        is_plain = reference.mode in ("RGB", "L", "CMYK") and "transparency" not in reference.info
        if is_plain and decoded.pixels.size < 10**7:
            difference = np.abs(decoded.pixels.astype(int) - np.asarray(reference.convert("RGB")))
            assert difference.mean() < 1.0, file.name
