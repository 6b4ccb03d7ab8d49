"""Standard output and errors, as wide as the terminal."""

import re
import sys
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from rlflow.errors import EngineError, UserError

if TYPE_CHECKING:
    from rlflow.runtime.base import Observer

WIDTH = 100
"""The columns of everything that goes to a file or a pipe."""


def output_console() -> Console:
    """Return the console for standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def displays(console: Console) -> "list[Observer]":
    """Return the observers that show a run: its progress, failed rewards, and engines that lag."""
    # They know nodes and engines; a dry run needs neither.
    from rlflow.report.engines import EngineReport
    from rlflow.report.failures import Failures
    from rlflow.report.progress import ProgressDisplay

    return [ProgressDisplay(console), Failures(console), EngineReport(console)]


def show(picture: RenderableType) -> None:
    """Print ``picture`` without blanks at the ends of lines."""
    console = output_console()
    with console.capture() as captured:
        console.print(picture)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def show_error(error: UserError | EngineError) -> None:
    """Print an error without a traceback: wrapped and coloured on a terminal, in its own lines elsewhere."""
    _show_lines(type(error).__name__, "bold red", str(error))


def show_warning(text: str) -> None:
    """Print a warning, in the form of an error."""
    _show_lines("warning", "yellow", text)


def _show_lines(kind: str, style: str, text: str) -> None:
    console = Console(stderr=True, highlight=False)
    first, *notes = text.splitlines()
    for line in (f"{kind}: {first}", *notes):
        lines = _wrapped(line, console.width) if console.is_terminal else [line]
        shown = Text("\n".join(lines))
        shown.highlight_regex(rf"^{kind}:", style)
        shown.highlight_regex(r"^  \w+:", "bold")
        console.print(shown, soft_wrap=True)


def _wrapped(line: str, width: int) -> list[str]:
    """Return ``line`` in lines that end between words, those after the first below its text."""
    label = re.match(r"  \w+: |", line)
    indent = " " * (len(label[0]) if label and label[0] else 2)
    return wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
