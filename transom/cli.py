"""The `transom` command: parser, dispatch, and errors as one line with an exit code.

Exit codes: 0 done, 1 failed, 2 a setting or argument is wrong, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transom import __version__
from transom.commands import bench, chat, doctor, health, keys, plan, stages, timeline, trace, up
from transom.commands.base import Parser, Run, examples
from transom.errors import CheckpointError, ConfigError, TransomError


def build_parser() -> Parser:
    """Return the parser of the whole command line; docs/cli.md is made from it."""
    parser = Parser(
        prog="transom",
        description="Multimodal encode / prefill / decode serving for hybrid sliding-window chat models.",
        epilog=examples(
            "transom up                                    run the whole pipeline with the demo model",
            "transom chat 'Who are you?'                   ask it something",
            "transom chat --image cat.jpg 'What is this?'  ask about a picture",
            "transom doctor                                check this machine",
        ),
    )
    parser.add_argument("--version", action="version", version=f"transom {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for module in (up, stages, chat, trace, timeline, bench, plan, doctor, keys, health):
        module.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code."""
    args = build_parser().parse_args(argv)
    run: Run = args.run
    try:
        return run(args)
    except TransomError as error:
        sys.stderr.write(f"transom {args.command}: {error.message}\n")
        return 2 if isinstance(error, (ConfigError, CheckpointError)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; a traceback would help nobody.
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
