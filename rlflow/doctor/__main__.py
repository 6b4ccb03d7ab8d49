"""``python -m rlflow.doctor [--gpu]``: a report on this machine, and how to mend what is broken.

Exit code 0: nothing is broken. 1: something that recipes need is.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from rlflow.doctor.finding import Finding, show

# Columns of the report where nothing says how wide the terminal is.
_WIDTH = 100

Sections = Iterator[tuple[str, list[Finding]]]
"""Titles and the lines below each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser("python -m rlflow.doctor", description="Report on this machine.")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="test what runs rely on: attention, updates, memory that is given back, copies between processes; "
        "at most ten minutes",
    )
    return _gpus() if parser.parse_args(arguments).gpu else _environment()


def _environment() -> int:
    from rlflow.doctor.environment import engines_here, report, verdict

    return _printed(report(), lambda broken: verdict(broken, engines_here()))


def _gpus() -> int:
    # The other report needs Hydra and more; a bare GPU machine may lack them.
    from rlflow.doctor.gpu import report, verdict

    return _printed(report(), verdict)


def _printed(sections: Sections, verdict: Callable[[int], str]) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    broken = 0
    for title, findings in sections:
        broken += sum(finding.broken for finding in findings)
        console.print(f"\n[bold]{title}[/]")
        show(console, findings)
    console.print(f"\n{verdict(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
