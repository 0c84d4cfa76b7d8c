"""`transom keys FILE`: make the key that the processes of a fleet share."""

from __future__ import annotations

import argparse

from transom.commands.base import Parser, examples, make_console


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "keys",
        help="make the fleet key that processes on different hosts need",
        description="Write a new CURVE key pair to FILE (mode 600). Every process of a fleet gets the same"
        " file through --curve-key-file; whoever holds it belongs to the fleet.",
        epilog=examples("transom keys fleet.key"),
    )
    parser.add_argument("file", metavar="FILE", help="file to write; must not exist yet")
    parser.add_argument("--if-missing", action="store_true", help="succeed when FILE is a valid key already")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from transom.curve import FleetKey

    console = make_console()
    if args.if_missing and Path(args.file).exists():
        FleetKey.load(args.file)
        console.print(f"{args.file} is a fleet key already")
        return 0
    FleetKey.create(args.file)
    console.print(f"wrote {args.file}; give it to every process as --curve-key-file {args.file}")
    return 0
