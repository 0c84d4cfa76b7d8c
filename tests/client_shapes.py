"""Requests as load generators send them, written down from their public sources: guidellm and aiperf.

`with_media` turns the media of a test into content parts in a generator's own spelling.
"""

from __future__ import annotations

import base64
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "Tell me in a few words who you are and what you can do for me today."
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "time"}'}}


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def guidellm_chat(content: list[dict[str, Any]], tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """guidellm: usage with every chunk, a fixed length of the answer, content always in parts."""
    return {
        "model": "mimo-nano",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": tokens,
        "stop": None,
        "ignore_eos": True,
        "messages": [
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": content},
        ],
        **fields,
    }


def guidellm_completion(tokens: int = 8, *, stream: bool = True) -> dict[str, Any]:
    """guidellm's other endpoint; with its default `stream` and without."""
    streamed = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return {
        "model": "mimo-nano",
        **(streamed if stream else {}),
        "max_tokens": tokens,
        "ignore_eos": True,
        "prompt": WORDS,
    }


def aiperf_chat(content: Any, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """aiperf: `stream` always there, the name in the message, extra inputs beside the rest."""
    return {
        "messages": [{"role": "user", "name": "aiperf", "content": content}],
        "model": "mimo-nano",
        "stream": True,
        "max_completion_tokens": tokens,
        "min_p": 0.0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def with_media(picture: bytes, clip: bytes, sound: bytes) -> dict[str, dict[str, Any]]:
    """Return all chat requests by name; the media are PNG, MP4 and WAV files."""
    text = {"type": "text", "text": WORDS}
    image = {"type": "image_url", "image_url": {"url": data_url("image/png", picture)}}
    video = {"type": "video_url", "video_url": {"url": data_url("video/mp4", clip)}}
    audio = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
    }
    history = [
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"status": "ok"}'},
        {"role": "user", "content": [text]},
    ]
    return {
        "guidellm text": guidellm_chat([text]),
        "guidellm image": guidellm_chat([text, image]),
        "guidellm video": guidellm_chat([text, video]),
        "guidellm audio": guidellm_chat([text, audio]),
        "guidellm all": guidellm_chat([text, image, video, audio]),
        "guidellm tools": guidellm_chat([], messages=history, tools=[TOOL], tool_choice="none"),
        "aiperf text": aiperf_chat(WORDS),
        "aiperf image": aiperf_chat([text, image | {"uuid": "picture-7"}]),
        "aiperf audio": aiperf_chat([text, audio]),
        "aiperf video": aiperf_chat([text, video]),
        "aiperf usage of every chunk": aiperf_chat(
            WORDS, stream_options={"include_usage": True, "continuous_usage_stats": True}
        ),
        "aiperf lengths": aiperf_chat(WORDS, ignore_eos=None, min_tokens=8),
        "aiperf legacy": aiperf_chat(
            WORDS, max_completion_tokens=None, max_tokens=8, temperature=0.0, seed=1
        ),
    }
