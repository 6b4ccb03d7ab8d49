"""Runs the doctor, ``rlflow doctor [--gpu]``: reports on this machine and how to fix problems.

The exit code is 1 if something that recipes need is broken, and 0 otherwise.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from rlflow.commands.doctor.finding import Finding, show

# The width of the report when the output is not a terminal.
_WIDTH = 100

Sections = Iterator[tuple[str, list[Finding]]]
"""Titles and the lines below each."""


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser("rlflow doctor", description="Report on this machine.")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="test what runs need: attention, updates, freeing memory, copies between processes; takes at most "
        "ten minutes",
    )
    return _gpus() if parser.parse_args(arguments).gpu else _environment()


def _environment() -> int:
    from rlflow.commands.doctor.environment import available_engines, report, verdict

    return _print_report(report(), lambda broken: verdict(broken, available_engines()))


def _gpus() -> int:
    # Imports only this report: the other one needs Hydra, which a bare GPU machine may lack.
    from rlflow.commands.doctor.gpu import report, verdict

    return _print_report(report(), verdict)


def _print_report(sections: Sections, verdict: Callable[[int], str]) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    broken = 0
    for title, findings in sections:
        broken += sum(finding.broken for finding in findings)
        console.print(f"\n[bold]{title}[/]")
        show(console, findings)
    console.print(f"\n{verdict(broken)}")
    return 1 if broken else 0
