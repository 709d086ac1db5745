"""The ``b12x`` command. It needs neither torch nor a driver; what is missing is reported, not raised."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

import b12x
from b12x.cli import doctor, kernels, verify
from b12x.cli.output import CommandError, table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    try:
        if arguments[:1] == ["build"]:
            return _build(arguments[1:])
        args = parser.parse_args(arguments)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except CommandError as error:
        if "--json" in arguments and arguments[0] != "verify":  # where it names a file
            print(json.dumps({"error": str(error)}))
        else:
            print(f"b12x: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="b12x", description="Precompiled kernels for SM120 and SM121 GPUs.")
    parser.add_argument("--version", action="version", version=f"b12x {b12x.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="what is installed, and whether kernels can run here")
    command.set_defaults(run=doctor.run)
    _json(command)

    command = commands.add_parser("ops", help="list the ops")
    command.set_defaults(run=_ops)
    _json(command)

    command = commands.add_parser("kernels", help="list the kernels of the installed packs")
    command.add_argument("filter", nargs="?", default="", help="part of a key; * and ? match anything")
    command.add_argument("--arch", help="only kernels for this architecture, such as sm_120a")
    command.set_defaults(run=kernels.run_list)
    _json(command)

    command = commands.add_parser("show", help="what is known about one kernel")
    command.add_argument("key", help="as `b12x kernels` prints it")
    command.add_argument("--sass", action="store_true", help="print its machine code (needs nvdisasm)")
    command.add_argument("--arch", help="architecture of the machine code; default: the first there is")
    command.set_defaults(run=kernels.run_show)
    _json(command)

    command = commands.add_parser("verify", help="run every kernel of the installed packs against its reference")
    command.set_defaults(run=verify.run)
    verify.add_arguments(command)

    # Its arguments are those of the build tools, which are imported only for this command.
    commands.add_parser("build", help="compile manifests into packs (needs the extra: b12x[jit])", add_help=False)
    return parser


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _ops(args: argparse.Namespace) -> int:
    ops = b12x.list_ops()
    if args.json:
        print(json.dumps([{"qualname": op.qualname, **asdict(op)} for op in ops]))
    else:
        rows = [(op.qualname, op.api_style, ", ".join(op.recipes), op.status, op.notes) for op in ops]
        print(table(("op", "style", "recipes", "status", "notes"), rows))
    return 0


def _build(arguments: list[str]) -> int:
    try:
        from b12x.build_tools import cli
    except ImportError as error:
        raise CommandError(
            f"`b12x build` cannot start: {error}; needed is the extra: pip install 'b12x[jit]'"
        ) from None
    parser = argparse.ArgumentParser(prog="b12x build", description="Compile manifests into packs of kernels.")
    cli.add_arguments(parser)
    return int(cli.run(parser.parse_args(arguments)))
