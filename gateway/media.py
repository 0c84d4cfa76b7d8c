"""Media content parts of a chat message: URLs and inline data become checked `MediaItem`s.

Pure; runs in the gateway process. Nothing is fetched or decoded as media here: the encoder does both.
"""

from __future__ import annotations

import binascii
from urllib.parse import urlsplit

from transom.errors import MediaError
from transom.gateway.api_requests import MAX_URL_CHARS
from transom.gateway.fields import Fields, refuse, show
from transom.gateway.schema import Limits, MediaItem
from transom.messages import MediaOptions, Modality

MEDIA_PARTS: dict[str, Modality] = {
    "image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
_PIECE_CHARS = 1 << 20  # a multiple of 4
_MAX_HEAD_CHARS = 256
_LOW_DETAIL_PIXELS = 512 * 512  # what OpenAI's documentation says of detail "low"
# Containers that hold sound as well as pictures are named either way by real clients.
_MEDIA_TYPES: dict[Modality, tuple[str, ...]] = {
    "image": ("image/",),
    "video": ("video/", "image/gif", "image/webp"),
    "audio": ("audio/", "video/mp4", "video/webm", "application/ogg"),
}
_NEUTRAL_TYPES = ("", "application/octet-stream", "binary/octet-stream")


def parse_media_part(part: Fields, kind: str, limits: Limits) -> MediaItem:
    """Return the item of a content part of type `kind`, one of MEDIA_PARTS."""
    modality = MEDIA_PARTS[kind]
    body = part.object(kind, required=True)
    assert body is not None
    if kind == "input_audio":
        return _input_audio(body, limits)
    param = body.at("url")
    url: str = body.text("url", required=True)
    options = _options(body, modality)
    if url[:5].lower() == "data:":
        data = decode_data_url(url, modality, param, limits.max_media_bytes)
        return MediaItem(modality=modality, param=param, data=data, options=options)
    check_url(url, param)
    return MediaItem(modality=modality, param=param, url=url, options=options)


def _input_audio(body: Fields, limits: Limits) -> MediaItem:
    param = body.at("data")
    data: str = body.text("data", required=True)
    form = body.text("format", required=True)
    if form == "pcm16":
        raise body.refuse("format", "raw pcm16 has no sampling rate of its own, send it as wav")
    if data[:5].lower() == "data:":
        content = decode_data_url(data, "audio", param, limits.max_media_bytes)
    else:
        content = _decode_base64(data, param, limits.max_media_bytes)
    return MediaItem(modality="audio", param=param, data=content)


def _options(body: Fields, modality: Modality) -> MediaOptions:
    low = body.integer("min_pixels") if modality != "audio" else None
    high = body.integer("max_pixels") if modality != "audio" else None
    if modality == "image":
        detail = body.text("detail")
        if detail == "low":
            high = min(high or _LOW_DETAIL_PIXELS, _LOW_DETAIL_PIXELS)
        _check_order(body, "min_pixels", low, "max_pixels", high)
        frame = body.integer("frame_index")
        return MediaOptions(min_pixels=low, max_pixels=high, frame_index=frame)
    if modality == "audio":
        return MediaOptions()
    _check_order(body, "min_pixels", low, "max_pixels", high)
    fewest = body.integer("min_frames")
    most = body.integer("max_frames")
    _check_order(body, "min_frames", fewest, "max_frames", most)
    fps = body.number("fps")
    return MediaOptions(
        min_pixels=low, max_pixels=high, fps=fps, min_frames=fewest, max_frames=most,
        use_audio=body.flag("use_audio"),
    )  # fmt: skip


def _check_order(body: Fields, low_name: str, low: int | None, high_name: str, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        raise body.refuse(low_name, f"{low} is more than {high_name} ({high})")


def check_url(url: str, param: str) -> None:
    """Raise RequestError unless `url` is plausible. Host or file are judged where they are read."""
    if len(url) > MAX_URL_CHARS:
        raise refuse(param, f"{len(url)} characters, at most {MAX_URL_CHARS} are allowed")
    if not url or any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url):
        raise refuse(param, "empty, or with a space or control character in it")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise refuse(param, "not a valid URL") from None
    scheme = parts.scheme.lower()
    if scheme == "file":
        return
    if scheme not in ("http", "https"):
        raise refuse(param, f"scheme {show(parts.scheme)} is not allowed, use http, https or data")
    if not host or port == 0:
        raise refuse(param, "the URL names no host or no valid port")
    if parts.username is not None or parts.password is not None:
        raise refuse(param, "user names and passwords in URLs are not allowed")


def decode_data_url(url: str, modality: Modality, param: str, limit_bytes: int) -> bytes:
    """Return the bytes of a base64 data: URL of at most `limit_bytes`. No message repeats the payload."""
    # By places, without a copy of the rest: it may be long.
    comma = url.find(",", 5, 5 + _MAX_HEAD_CHARS + 1)
    if comma < 0:
        raise MediaError(f"{param}: a data: URL needs a media type, ';base64' and a comma", param=param)
    media_type, *parameters = [piece.strip().lower() for piece in url[5:comma].split(";")]
    if "base64" not in parameters:
        raise MediaError(f"{param}: the data: URL is not marked ';base64'", param=param)
    if media_type == "video/jpeg":
        raise MediaError(f"{param}: lists of JPEG frames are not taken, send a video file", param=param)
    allowed = _MEDIA_TYPES[modality]
    if media_type not in _NEUTRAL_TYPES and not media_type.startswith(allowed):
        raise MediaError(
            f"{param}: media type {show(media_type)} is not {modality}, expected {allowed[0]}...", param=param
        )
    return _decode_base64(url, param, limit_bytes, comma + 1)


def _decode_base64(text: str, param: str, limit_bytes: int, begin: int = 0) -> bytes:
    """Return the bytes of a text's base64, which starts at a place of it."""
    chars = len(text) - begin
    size = chars // 4 * 3 - text.count("=", max(begin, len(text) - 2))
    if size > limit_bytes:
        raise MediaError(f"{param}: {size} bytes, at most {limit_bytes} are allowed", param=param)
    if not chars:
        raise MediaError(f"{param}: no data", param=param)
    try:
        if text.find("=", begin, -2) >= 0:
            raise binascii.Error("padding in the middle")
        # In pieces: one call on a large payload would hold the interpreter, and with it the event loop.
        return b"".join(
            binascii.a2b_base64(text[at : at + _PIECE_CHARS], strict_mode=True)
            for at in range(begin, len(text), _PIECE_CHARS)
        )
    except ValueError as error:  # binascii.Error, or a character beyond ASCII
        raise MediaError(f"{param}: not valid base64: {_reason(text[begin:], error)}", param=param) from None


def _reason(payload: str, error: ValueError) -> str:
    if "-" in payload or "_" in payload:
        return "'-' or '_' of the URL-safe alphabet, the standard one is needed"
    if any(char.isspace() for char in payload):
        return "white space inside"
    if not isinstance(error, binascii.Error):
        return "a character outside the alphabet"
    if len(payload) % 4 and "padding" in str(error).lower():
        return f"length {len(payload)} is no multiple of 4 (padding is missing)"
    return "a character outside the alphabet, or wrong padding"
