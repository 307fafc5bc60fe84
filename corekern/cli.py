"""The `corekern` command."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

# Each a module with add_arguments(parser) and run(options) -> exit code, and what it is for. Only the command that is run
# pays for importing it.
COMMANDS = {
    "demo": (
        "corekern_examples.demo",
        "run a real language model on an FP8 KV cache and report what it costs",
    ),
    "trace": (
        "corekern.instruments.trace",
        "compare two runs' prompt log-probs: difference, drift, flips of the likeliest token",
    ),
    "acceptance": (
        "corekern.instruments.acceptance",
        "acceptance rate and length of speculative decoding, from counters, with intervals",
    ),
    "capacity": (
        "corekern.instruments.capacity",
        "tokens that fit in a memory budget, by KV format and by part of a model's caches",
    ),
    "routes": (
        "corekern.instruments.routes",
        "resolved KV dtype, the route of a call and why no other, logit precision, revision",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns 0, 1 where the work failed, or 2 where the arguments or files are bad."""
    parser = argparse.ArgumentParser(
        prog="corekern", description="Attention over FP8 paged KV caches, FP32 state."
    )
    parser.add_argument("--version", action="store_true", help="print the version and the precision revision")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser("doctor", help="what is installed, which devices, which routes and why")
    doctor.add_argument("--json", action="store_true", help="print plain data")
    doctor.add_argument(
        "--kernels",
        action="store_true",
        help="compile every kernel and print its registers, shared memory and occupancy",
    )
    doctor.add_argument(
        "--arch", nargs="+", metavar="SM", help="with --kernels: such as sm_90; all when left out"
    )
    doctor.add_argument("--source", nargs="+", metavar="CU", help="with --kernels: such as grouped_mma.cu")

    arguments = sys.argv[1:] if argv is None else argv
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if name == asked:
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(arguments)
    if options.version:
        from corekern import PRECISION_REVISION, __version__

        print(f"corekern {__version__} (precision revision {PRECISION_REVISION})")
        return 0
    if options.command in COMMANDS:
        return importlib.import_module(COMMANDS[options.command][0]).run(options)
    if options.command == "doctor" and options.kernels:
        return _kernels(options)
    if options.command == "doctor":
        from corekern.doctor import render, report

        data = report()
        print(json.dumps(data, indent=1) if options.json else render(data))
        return 0
    parser.print_help()
    return 2


def _kernels(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from corekern.cuda import nvrtc, occupancy
    from corekern.cuda.kernels import ARCHITECTURES, KERNELS

    for given, allowed, name in (
        (options.arch, ARCHITECTURES, "--arch"),
        (options.source, tuple(KERNELS), "--source"),
    ):
        unknown = [value for value in given or () if value not in allowed]
        if unknown:
            print(
                f"corekern doctor: {name}: {unknown[0]} is not one of {', '.join(allowed)}", file=sys.stderr
            )
            return 2
    try:
        nvrtc.version()
    except ImportError as error:
        print(f"corekern doctor: {error}", file=sys.stderr)
        return 1
    found = occupancy.kernels(options.arch or ARCHITECTURES, options.source or tuple(KERNELS))
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in found], indent=1))
    else:
        for line in occupancy.render(found):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
