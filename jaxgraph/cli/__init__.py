"""The command line: `python -m jaxgraph doctor|explain|bench`.

Exit codes: 0 all is well; 1 something failed, or gave wrong results; 2 the command was not
understood; 3 it works, but not as it could: the plain function runs, or something is switched off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxgraph.cli import bench, doctor, explain
from jaxgraph.cli.target import TargetError
from jaxgraph.cli.terminal import Terminal

OK, FAILED, USAGE, PLAIN = 0, 1, 2, 3

# A command returns what it found as plain data, a way to print that, and the exit code.
Command = Callable[[argparse.Namespace], "tuple[dict[str, Any], Callable[[Terminal], None], int]"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments; default those of the process.

    Returns:
      The exit code; see the module.
    """
    args = _parser().parse_args(argv)
    run: Command = args.run
    try:
        found, show, code = run(args)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(Terminal(sys.stdout))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxgraph",
        description="Looks at jaxgraph's installation, or at how a function of yours is run.",
        epilog=__doc__.split("\n\n")[1] if __doc__ else None,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (doctor, explain, bench):
        summary = (module.__doc__ or "").split("\n")[0]
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument("--json", action="store_true", help="print JSON, for machines")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
