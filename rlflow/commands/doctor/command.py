"""Runs the doctor, ``rlflow doctor [--gpu]``: reports on this machine and how to fix problems.

The exit code is 1 if something that recipes need is broken, and 0 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console

from rlflow.commands.doctor.finding import show

# The width of the report when the output is not a terminal.
_WIDTH = 100


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser("rlflow doctor", description="Report on this machine.")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="test what runs need: attention, updates, freeing memory, copies between processes; takes at most "
        "ten minutes",
    )
    # Imports only this report: the one without --gpu needs Hydra, which a bare GPU machine may lack.
    kind = "gpu" if parser.parse_args(arguments).gpu else "environment"
    report = import_module(f"rlflow.commands.doctor.{kind}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    broken = 0
    for title, findings in report.report():
        broken += sum(finding.broken for finding in findings)
        console.print(f"\n[bold]{title}[/]")
        show(console, findings)
    console.print(f"\n{report.verdict(broken)}")
    return 1 if broken else 0
