"""The command line: a recipe to plan and run, or one of the subcommands.

Exit codes: 0 for success, 1 if an engine failed, 2 for a mistake in the recipe or on the command line, and 130 or 143
if the run was stopped by Ctrl-C or SIGTERM.
"""

import sys
from importlib import import_module

SUBCOMMANDS = {
    "calibrate": "rlflow.commands.calibrate.__main__",
    "convert": "rlflow.commands.convert.__main__",
    "doctor": "rlflow.commands.doctor.__main__",
    "replay": "rlflow.commands.replay",
    "report": "rlflow.report.__main__",
    "watch": "rlflow.commands.watch",
}
"""The modules of the subcommands. Each has a function ``main`` that takes arguments and returns the exit code."""


def main() -> int:
    """Run the command line with this process's arguments; return the exit code."""
    # Commands are imported when they are named: the doctor of a bare GPU machine must not need Hydra.
    name, *rest = sys.argv[1:] or [""]
    if name in SUBCOMMANDS:
        code: int = import_module(SUBCOMMANDS[name]).main(rest)
        return code
    from rlflow.commands.run import main as run

    return run()
