"""What tuning found, next to what was predicted."""

import json
from pathlib import Path

from rich import box
from rich.table import Table

from rlflow.runtime.tuner import FILE


def tuning_table(directory: Path) -> Table | str:
    """Of the run in ``directory``; a line that says why where nothing was tuned."""
    found = json.loads((directory / FILE).read_text())
    if not found:
        return "nothing to tune: every micro_batch_tokens is pinned, and no engine takes more sequences while it writes"
    if not any(entry["trials"] for entry in found.values()):
        return "nothing tuned: the first trial takes three steps"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("role", "setting", "", "tokens/s", "predicted", "memory", "predicted", "gain"):
        table.add_column(heading)
    for role, entry in found.items():
        predicted, trials = entry["predicted"], entry["trials"]
        first = next((trial for trial in trials if trial["setting"] == entry["planned"]), None)
        for trial in trials:
            planned, best = trial is first, trial["setting"] == entry["best"]
            rate = first["tokens_per_second"] if first and not planned else 0
            gain = trial["tokens_per_second"] / rate - 1 if rate else None
            table.add_row(
                role if trial is trials[0] else "",
                entry["setting"] if trial is trials[0] else "",
                f"{trial['setting']}{' (planned)' if planned else ''}{' (kept)' if best else ''}",
                f"{trial['tokens_per_second']:.0f}",
                _written(predicted["tokens_per_second"], "{:.0f}") if planned else "",
                _written(trial["memory_share"] or None, "{:.0%}"),
                _written(predicted["memory_share"], "{:.0%}") if planned else "",
                _written(gain, "{:+.0%}"),
                style="bold" if best else None,
            )
    return table


def _written(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
