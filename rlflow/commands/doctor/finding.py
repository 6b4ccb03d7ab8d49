"""The lines of a report."""

from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """A line of a report, marked as ok, note, broken or skipped."""

    name: str
    fact: str
    fix: str | None = None
    """How to fix it. A line with a fix is a note, unless it is broken."""
    broken: bool = False
    skipped: bool = False
    """Nothing was tested, for the reason that ``fact`` gives."""

    @classmethod
    def compare(cls, name: str, value: str, expected: str, passed: bool) -> "Finding":
        """Return the line for a measured value beside the expected one, both as text."""
        return cls(name, f"{value}; expected {expected}", broken=not passed)

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, suffix: str = "") -> "Finding":
        """Return the line for a value that should be finite and not above ``limit``."""
        return cls.compare(name, f"{value:.3g}{suffix}", f"at most {limit:.3g}{suffix}", value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, suffix: str = "") -> "Finding":
        """Return the line for a value that should not be below ``limit``."""
        return cls.compare(name, f"{value:.3g}{suffix}", f"at least {limit:.3g}{suffix}", value >= limit)

    @property
    def mark(self) -> str:
        """Return the word in front of the line, with its colour."""
        if self.broken:
            return "[red]broken[/]"
        if self.skipped:
            return "[dim]skip[/]"
        return "[yellow]note[/]" if self.fix else "[green]ok[/]"


def show(console: Console, findings: list[Finding]) -> None:
    """Print a row for each finding, with its fix below."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=6)
    table.add_column(no_wrap=True, min_width=17)
    table.add_column()
    for finding in findings:
        table.add_row(finding.mark, escape(finding.name), escape(finding.fact))
        if finding.fix:
            table.add_row("", "", f"[dim]Fix:[/] {escape(finding.fix)}")
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")
