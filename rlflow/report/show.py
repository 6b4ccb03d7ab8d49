"""Shows plans and reports to a person: text on a terminal or in a file, HTML in a notebook."""

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.plan import Plan
from rlflow.report.console import WIDTH, output_console, print_picture
from rlflow.report.plan_text import render
from rlflow.runtime.protocols import Report

# The metrics that are drawn: held-out rows, rewards, and what shows whether a policy learns or breaks.
_DRAWN = re.compile(r"evaluation/.*|.*/(mean|accuracy|loss|kl|entropy|length_mean)")
# The most points of a curve, and characters of a text.
_POINTS, _CHARACTERS = 200, 600
# The size of a curve, in pixels.
_WIDTH, _HEIGHT = 200, 80
_TIMES = ("in a step", "predicted", "measured")


def show(shown: Plan | Report, *, explain: bool = False) -> None:
    """Show a plan as the command line does, or what a run has reached.

    ``explain`` adds to a plan its graph, all alternatives and all limits.
    """
    console = Console()
    if isinstance(shown, Plan):
        picture = render(shown, explain=explain, width=min(WIDTH, output_console().width))
        if console.is_jupyter:
            console.print(picture)
        else:
            print_picture(picture)
    elif console.is_jupyter:
        from IPython.display import HTML, display  # exists where a notebook runs

        display(HTML(report_html(shown)))
    else:
        print_picture(report_text(shown))


def report_text(report: Report) -> RenderableType:
    """Return how the run ended, and its times beside the predicted ones."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in _TIMES:
        table.add_column(heading)
    for row in _times(report):
        table.add_row(*map(Text, row))
    return Group(Text.assemble((report.name, "bold"), " ", _summary(report)), Text(), table)


def report_html(report: Report) -> str:
    """Return the same as HTML, with curves of the metrics and samples of the first and the last step."""
    history, samples = report.history(), report.samples()
    drawn = {name: None for line in history for name in line if _DRAWN.fullmatch(name)}
    curves = {
        name: [(int(line["step"]), line[name]) for line in history if math.isfinite(line.get(name, math.nan))]
        for name in sorted(drawn, key=lambda name: not name.startswith("evaluation/"))
    }
    steps = [sample["step"] for sample in samples]
    ends = [sample for sample in samples if sample["step"] in (min(steps), max(steps))]
    # These classes keep what a model writes between dollars from being typeset as a formula.
    parts = ['<div class="tex2jax_ignore mathjax_ignore">']
    parts += [f"<p><b>{escape(report.name)}</b> {escape(_summary(report))}</p>"]
    parts += [_curve(name, points) for name, points in curves.items() if points]
    parts += [_table(_TIMES, _times(report))]
    parts += [_table(("step", "sample", "reward", "prompt", "response"), map(_sample, ends))] if ends else []
    return "".join([*parts, "</div>"])


def _summary(report: Report) -> str:
    words = f"{report.status}: {report.steps} steps in {report.seconds:.0f} s, in {report.directory}"
    if report.eval_before is not None and report.eval_after is not None:
        words += f"; held-out {report.eval_before:.3f} before, {report.eval_after:.3f} after"
    return words


def _times(report: Report) -> Iterator[list[str]]:
    for name, times in {"the whole step": report.step, **report.nodes}.items():
        seconds = (times.get("predicted"), times.get("measured"))
        yield [name, *("" if value is None else f"{value:.3g} s" for value in seconds)]


def _sample(sample: Mapping[str, Any]) -> list[str]:
    reward = "" if sample["reward"] is None else f"{sample['reward']:.3g}"
    return [str(sample["step"]), sample["choice"], reward, _shorten(sample["prompt"]), _shorten(sample["response"])]


def _table(headings: Sequence[str], rows: Iterator[list[str]]) -> str:
    """Return a table of texts that may hold anything."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    style = 'style="text-align: left; white-space: pre-wrap"'
    body = ["".join(f"<td {style}>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table>"


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Return a curve as an image, because GitHub removes drawings from the HTML of notebooks, but shows images."""
    (first, begin), (last, end) = points[0], points[-1]
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = _WIDTH / max(1, last - first), _HEIGHT / (high - low or 1.0)
    # The last point comes twice where it is one of those: a line between equal points is a dot.
    shown = [*points[:: math.ceil(len(points) / _POINTS)], points[-1]]
    line = " ".join(f"{across * (step - first):.1f},{_HEIGHT - up * (value - low):.1f}" for step, value in shown)
    below = _HEIGHT + 14
    texts = [(0, -8, "start", name), (0, below, "start", f"{first}"), (_WIDTH, below, "end", f"step {last}")]
    texts += [(-4, _HEIGHT, "end", f"{low:.3g}")] + ([(-4, 8, "end", f"{high:.3g}")] if low < high else [])
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' for x, y, anchor, text in texts
    )
    # Both colours can be read on white and on black.
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 60}" height="{_HEIGHT + 45}"'
        f' viewBox="-50 -25 {_WIDTH + 60} {_HEIGHT + 45}" font-family="sans-serif" font-size="11" fill="#777">{labels}'
        f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="#777" stroke-width="0.5"/>'
        f'<polyline points="{line}" fill="none" stroke="#2f81f7" stroke-width="2"'
        ' stroke-linecap="round" stroke-linejoin="round"/></svg>'
    )
    words = escape(f"{name}: {begin:.3g} in step {first}, {end:.3g} in step {last}")
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{words}" title="{words}" style="display: inline" src="data:image/svg+xml;base64,{data}">'


def _shorten(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
