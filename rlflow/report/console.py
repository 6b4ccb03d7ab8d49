"""Terminal output: pictures, errors and warnings."""

import re
import sys
from textwrap import wrap

from rich.console import Console, RenderableType
from rich.text import Text

from rlflow.errors import EngineError, UserError

WIDTH = 100
"""The width of output to a file or a pipe."""


def output_console() -> Console:
    """Return the console for standard output."""
    # A notebook says that it is a terminal, but cannot go back to a line; rich would make an output of each line there.
    is_notebook = Console().is_jupyter
    width = None if sys.stdout.isatty() and not is_notebook else WIDTH
    return Console(highlight=False, force_jupyter=False, force_terminal=False if is_notebook else None, width=width)


def print_picture(picture: RenderableType) -> None:
    """Print ``picture`` without spaces at the ends of lines."""
    console = output_console()
    with console.capture() as captured:
        console.print(picture)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def show_error(error: UserError | EngineError) -> None:
    """Print an error and its notes without a traceback, wrapped and coloured on a terminal."""
    _show_lines(type(error).__name__, "bold red", "\n".join([str(error), *getattr(error, "__notes__", ())]))


def show_warning(text: str) -> None:
    """Print a warning in the same form as an error."""
    _show_lines("warning", "yellow", text)


def _show_lines(kind: str, style: str, text: str) -> None:
    console = Console(stderr=True, highlight=False)
    first, *notes = text.splitlines()
    for line in (f"{kind}: {first}", *notes):
        lines = _wrap_between_words(line, console.width) if console.is_terminal else [line]
        shown = Text("\n".join(lines))
        shown.highlight_regex(rf"^{kind}:", style)
        shown.highlight_regex(r"^  \w+:", "bold")
        console.print(shown, soft_wrap=True)


def _wrap_between_words(line: str, width: int) -> list[str]:
    """Wrap ``line`` between words, with later lines indented to the text after a label such as ``Fix:``."""
    label = re.match(r"  \w+: |", line)
    indent = " " * (len(label[0]) if label and label[0] else 2)
    return wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
