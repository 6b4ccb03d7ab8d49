"""The command line: a recipe to plan and run, or one of the subcommands.

Exit codes: 0 for success, 1 if an engine failed, 2 for a mistake in the recipe or on the command line, and 130 or 143
if the run was stopped by Ctrl-C or SIGTERM.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from rlflow.errors import EngineError, UserError, make_printable

SUBCOMMANDS = {
    "calibrate": "rlflow.commands.calibrate.command",
    "convert": "rlflow.commands.convert.command",
    "doctor": "rlflow.commands.doctor.command",
    "replay": "rlflow.commands.replay",
    "report": "rlflow.commands.report",
    "watch": "rlflow.commands.watch",
}
"""The modules of the subcommands. Each has a function ``main`` that takes arguments and returns the exit code."""


def main() -> int:
    """Run the command line with this process's arguments; return the exit code."""
    # Commands are imported when they are named: the doctor of a bare GPU machine must not need Hydra.
    name, *rest = sys.argv[1:] or [""]
    if name in SUBCOMMANDS:
        return run_subcommand(name, rest)
    from rlflow.commands.run import main as run

    return run()


def run_subcommand(name: str, arguments: Sequence[str]) -> int:
    """Run one of ``SUBCOMMANDS``; print its error if it fails, and return the exit code."""
    try:
        code: int = import_module(SUBCOMMANDS[name]).main(arguments)
        return code
    except (UserError, EngineError) as error:
        print(make_printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
