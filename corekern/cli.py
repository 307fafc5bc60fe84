"""The `corekern` command."""

from __future__ import annotations

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns 0, 1 where the work failed, or 2 where the arguments or files are bad."""
    parser = argparse.ArgumentParser(
        prog="corekern", description="Attention over FP8 paged KV caches, FP32 state."
    )
    parser.add_argument("--version", action="store_true", help="print the version and the precision revision")
    commands = parser.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser(
        "demo", help="run a real language model on an FP8 KV cache and report what it costs"
    )
    doctor = commands.add_parser("doctor", help="what is installed, which devices, which routes and why")
    doctor.add_argument("--json", action="store_true", help="print plain data")

    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["demo"]:
        # The demo's options live with it; nothing else pays for importing it.
        import corekern_examples.demo as demo_command

        demo_command.add_arguments(demo)
        return demo_command.run(parser.parse_args(arguments))
    options = parser.parse_args(arguments)
    if options.version:
        from corekern import PRECISION_REVISION, __version__

        print(f"corekern {__version__} (precision revision {PRECISION_REVISION})")
        return 0
    if options.command == "doctor":
        from corekern.doctor import render, report

        data = report()
        print(json.dumps(data, indent=1) if options.json else render(data))
        return 0
    parser.print_help()
    return 2


if __name__ == "__main__":
    sys.exit(main())
