"""One picture's bytes to RGB pixels: JPEG through simplejpeg, all else through Pillow.

Decode worker. The header decides before any raster is allocated. Knows nothing of patches or tensors.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from transom.encoder.media.faults import PICTURE_ERRORS, memory_fault, picture_fault
from transom.encoder.media.sniff import describe_unreadable_picture
from transom.encoder.media.wire import ImageJob
from transom.errors import MediaError
from transom.kernels.smart_resize import UnusableSizeError, smart_resize
from transom.messages import MediaSize

Pixels = NDArray[np.uint8]

logger = logging.getLogger(__name__)


def _heif() -> tuple[str, ...]:
    """Let Pillow read HEIC where the extra `heif` is installed; return the name of the format."""
    try:
        import pi_heif
    except ImportError:
        return ()
    pi_heif.register_heif_opener()
    return ("HEIF",)


# No format that runs programs (EPS), reads other files or has no use in a chat.
FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "ICO", "JPEG2000", "PPM", *_heif(),
)  # fmt: skip
_ORIENTATION_TAG = 0x0112
_TRANSPOSED = (5, 6, 7, 8)
_MOST_DRAWN = 20  # largest pictures that may be drawn on the way to a frame of an animation
_NARROW_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """`pixels` are uint8 (height, width, 3); `target` is the (height, width) that the model wants."""

    pixels: Pixels
    target: tuple[int, int]


def target_size(height: int, width: int, job: ImageJob) -> tuple[int, int]:
    """Return the size that the model wants for a picture; raise MediaError when there is none."""
    try:
        target = smart_resize(
            height,
            width,
            factor=job.factor,
            min_pixels=job.min_pixels,
            max_pixels=job.max_pixels,
            max_aspect_ratio=job.max_aspect_ratio,
        )
    except UnusableSizeError as error:
        raise MediaError(f"image of {width}x{height} pixels can't be used: {error}") from None
    tokens = target[0] * target[1] // job.factor**2
    if tokens > job.max_tokens:
        raise MediaError(f"image costs {tokens} tokens, limit {job.max_tokens}")
    return target


@contextmanager
def _as_media_error(job: ImageJob) -> Iterator[None]:
    """Turn what the libraries raise on bad bytes into a MediaError."""
    try:
        yield
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        claimed = re.search(r"\d+ pixels", str(error))
        size = claimed[0] if claimed else "too many pixels"
        raise MediaError(f"image of {size}, limit {job.max_image_pixels}") from None
    except MemoryError:
        raise MediaError(memory_fault("image")) from None
    except PICTURE_ERRORS as error:
        logger.info("a picture can't be decoded: %r", error)
        raise MediaError(f"image can't be decoded: {picture_fault(error)}") from None


def decode_image(
    data: memoryview, job: ImageJob, on_size: Callable[[MediaSize], None] = lambda _: None
) -> DecodedImage:
    """Decode a picture upright and opaque; raise MediaError when it can't be, with the reason.

    `on_size` is told its size before anything is decoded.
    """
    if not len(data):
        raise MediaError("image is empty (0 bytes)")
    # Also guards pictures inside of pictures. Pillow refuses above twice this, its warning is not needed.
    Image.MAX_IMAGE_PIXELS = job.max_image_pixels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _as_media_error(job):
            try:
                image = Image.open(io.BytesIO(data), formats=FORMATS)
            except UnidentifiedImageError:
                found = describe_unreadable_picture(data, reads_heic="HEIF" in FORMATS)
                kind = "can't be decoded" if found.startswith("a damaged") else "format is not supported"
                raise MediaError(f"image {kind}: the bytes look like {found}") from None
            return _decode(image, data, job, on_size)


def _decode(
    image: Image.Image, data: memoryview, job: ImageJob, on_size: Callable[[MediaSize], None]
) -> DecodedImage:
    width, height = image.size
    if width * height > job.max_image_pixels:
        raise MediaError(f"image of {width}x{height} = {width * height} pixels, limit {job.max_image_pixels}")
    stored_target = target_size(height, width, job)
    tokens = stored_target[0] * stored_target[1] // job.factor**2
    on_size(MediaSize(pixels=width * height, visual_tokens=tokens))
    if image.format == "PNG":
        # Asking a PNG for its EXIF loads it, and a second load would not tell what the first one met.
        image.load()
    orientation = _orientation(image)
    target = stored_target[::-1] if orientation in _TRANSPOSED else stored_target
    pixels = None
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L") and job.frame_index == 0:
        pixels = _fast_jpeg(data, image.size, stored_target, job)
    if pixels is None:
        pixels = _through_pillow(image, stored_target, job)
    return DecodedImage(_turn(pixels, orientation), target)


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # turned by Pillow itself while loading
        return 1
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # a broken EXIF block must not cost the picture
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _turn(pixels: Pixels, orientation: int) -> Pixels:
    """Apply an EXIF orientation; a view where possible."""
    flips = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels[::-1].transpose(1, 0, 2),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: pixels[:, ::-1].transpose(1, 0, 2),
    }
    return flips[orientation]


def _spare_factor(size: tuple[int, int], target: tuple[int, int]) -> float:
    """Return how many times larger than needed the stored picture is, along its tighter side."""
    width, height = size
    return min(height / target[0], width / target[1])


def _fast_jpeg(
    data: memoryview, size: tuple[int, int], target: tuple[int, int], job: ImageJob
) -> Pixels | None:
    """Decode with libjpeg-turbo; None when it has objections, for Pillow to judge."""
    reduced = job.reduced_jpeg or size[0] * size[1] > job.full_decode_pixels
    try:
        return simplejpeg.decode_jpeg(  # type: ignore[no-any-return]
            data,
            colorspace="RGB",
            min_height=target[0] if reduced else 0,
            min_width=target[1] if reduced else 0,
            min_factor=1,
        )
    except ValueError:
        return None


def _through_pillow(image: Image.Image, target: tuple[int, int], job: ImageJob) -> Pixels:
    if job.frame_index:
        frames = getattr(image, "n_frames", 1)
        if job.frame_index >= frames:
            raise MediaError(f"frame_index is {job.frame_index}, the image has {frames} frames")
        # Every frame is drawn on the canvas of those before it, however little of it it changes.
        drawn, limit = (job.frame_index + 1) * image.width * image.height, _MOST_DRAWN * job.max_image_pixels
        if drawn > limit:
            raise MediaError(f"frame_index is {job.frame_index}: {drawn} pixels up to it, limit {limit}")
        image.seek(job.frame_index)
    large = image.size[0] * image.size[1] > job.full_decode_pixels
    if large and image.format == "JPEG":
        image.draft("RGB", (target[1], target[0]))
    image.load()
    spare = int(_spare_factor(image.size, target)) if large else 1
    # Reducing first keeps the copies of a large picture small; only these modes can be averaged.
    if spare >= 2 and image.mode in ("RGB", "RGBA", "L", "LA", "CMYK", "YCbCr"):
        info = image.info
        image = image.reduce(spare)
        image.info = info
        spare = 1
    opaque = _opaque(image, job.background)
    return np.asarray(opaque.reduce(spare) if spare >= 2 else opaque)


def _opaque(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert any mode to RGB, transparent pixels over the background."""
    if image.mode in _NARROW_MODES or image.mode in ("I", "F"):
        return _narrow(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        flat = Image.new("RGB", image.size, background)
        flat.paste(rgba, mask=rgba.getchannel("A"))
        return flat
    return image if image.mode == "RGB" else image.convert("RGB")


def _narrow(image: Image.Image) -> Image.Image:
    """Bring grey values of 16 or 32 bit or float to 8 bit; Pillow's own conversion clips them."""
    values = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        top = 1.0 if np.nanmax(values, initial=0.0) <= 1.0 else 255.0
    else:
        top = 255.0 if image.mode == "I" and values.max(initial=0) <= 255 else 65535.0
    grey = np.nan_to_num(values * (255.0 / top)).round().clip(0, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
