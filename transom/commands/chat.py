"""`transom chat`: talk to a server from a terminal, with pictures, video and sound.

One question from the command line, or a conversation; knows the public API only.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any, cast

from transom.commands.base import Parser, base_url, examples, make_console
from transom.config import client_api_key
from transom.errors import ConfigError, TransomError
from transom.messages import Modality

if TYPE_CHECKING:
    from transom.client import Answer

_HELP = (
    "Type a message. /image FILE, /video FILE and /audio FILE attach to the next one;"
    " /reset forgets the conversation, /quit ends."
)


class _Attach(argparse.Action):
    """Collects --image, --video and --audio in one list, in the order given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        namespace.media = [*(namespace.media or []), (str(option).lstrip("-"), values)]


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a running server",
        description="Ask one question when PROMPT is given, else hold a conversation. "
        + _HELP
        + " A key for the API is read from TRANSOM_API_KEY.",
        epilog=examples(
            "transom chat 'Who are you?'",
            "transom chat --image shirt.png 'What is this?'",
            "transom chat --url http://host-a:8000 --video clip.mp4 --audio question.wav",
        ),
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question; - reads it from stdin")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="server (default %(default)s)"
    )
    parser.add_argument("--model", default="", metavar="ID", help="model id (default: the server's first)")
    for kind in ("image", "video", "audio"):
        parser.add_argument(
            f"--{kind}", action=_Attach, dest="media", metavar="FILE", help=f"attach this {kind} (repeatable)"
        )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="(default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the sampling")
    parser.add_argument("--stats", action="store_true", help="show times and token counts after each answer")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.prompt == "-":
        args.prompt = sys.stdin.read()
    chat = Chat(args)
    if args.prompt is not None or not sys.stdin.isatty():
        prompt = args.prompt if args.prompt is not None else sys.stdin.read()
        chat.ask(prompt, args.media or [])
        return 0
    return chat.converse(args.media or [])


class Chat:
    """A conversation: the messages so far and how to get the next answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._url = base_url(args.url)
        self._console = make_console()
        self._messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        system = self._args.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def converse(self, media: list[tuple[str, str]]) -> int:
        """Read and answer until the person ends it."""
        self._console.print(_HELP, style="dim")
        while True:
            try:
                line = input("you> ").strip()
            except EOFError:
                return 0
            command, _, rest = line.partition(" ")
            if command in ("/quit", "/exit"):
                return 0
            if command == "/reset":
                self.reset()
                media = []
            elif command in ("/image", "/video", "/audio"):
                media = [*media, (command[1:], rest.strip())]
            elif line:
                try:
                    self.ask(line, media)
                    media = []
                except TransomError as error:
                    self._console.print(f"error: {error.message}", style="red")

    def ask(self, prompt: str, media: list[tuple[str, str]]) -> None:
        """Put a question, print the answer as it comes, remember both."""
        if not prompt.strip() and not media:
            raise ConfigError("nothing to ask: give a prompt or attach a file")
        from transom.client import media_part  # loads the HTTP library: not for a help text

        parts: list[dict[str, Any]] = [media_part(path, cast(Modality, kind)) for kind, path in media]
        content: Any = [*parts, {"type": "text", "text": prompt}] if parts else prompt
        messages = [*self._messages, {"role": "user", "content": content}]
        answer = asyncio.run(self._answer(messages))
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if self._args.stats:
            usage = answer.usage
            self._console.print(
                f"[{usage.get('prompt_tokens')} tokens in, {usage.get('completion_tokens')} out,"
                f" first after {(answer.ttft_s or answer.e2e_s) * 1000:.0f} ms,"
                f" all after {answer.e2e_s * 1000:.0f} ms]",
                style="dim",
            )

    async def _answer(self, messages: list[dict[str, Any]]) -> Answer:
        from transom.client import Answer, ChatClient

        args = self._args
        answer = Answer()
        async with ChatClient(self._url, api_key=client_api_key()) as client:
            body = {
                "model": args.model or (await client.models())[0],
                "messages": messages,
                "max_tokens": args.max_tokens,
                "temperature": args.temperature,
            }
            if args.seed is not None:
                body["seed"] = args.seed
            async for piece in client.stream(body, answer):
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
        return answer
