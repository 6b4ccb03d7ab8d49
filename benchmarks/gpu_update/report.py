"""The comparison of all systems: who computes the same, the table, and the goals."""

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.gpu_update.cases import PEAK_FLOPS
from benchmarks.gpu_update.worker import Result
from benchmarks.reporting import Goal

# The largest difference of loss and gradient norm at which systems count as computing the same.
TOLERANCE = 0.02


def disagreement(result: Result, results: Sequence[Result]) -> str:
    """Return how the first update differs from the median of all systems; empty if it agrees."""
    same = [other for other in results if not other.error and (other.model, other.data) == (result.model, result.data)]
    texts = []
    for name in ("loss", "grad_norm"):
        value, median = getattr(result, name), statistics.median(getattr(other, name) for other in same)
        if not abs(value - median) <= TOLERANCE * abs(median):
            texts.append(f"{name} {value:.5g}, others {median:.5g}")
    return ", ".join(texts)


def line(result: Result, results: Sequence[Result]) -> str:
    """Return one result as a line of text, to be printed as soon as it is known."""
    head = f"{result.model} {result.data} {result.arm}:"
    if result.error:
        return f"{head} {result.error}"
    values = f"loss {result.loss:.5f}, norm {result.grad_norm:.5f}"
    if problem := disagreement(result, results):
        return f"{head} NOT THE SAME: {problem}"
    milliseconds = [round(1000 * value) for value in result.seconds]
    speed, mfu = result.tokens / result.median_s, result.computed_flops / result.median_s / PEAK_FLOPS
    return (
        f"{head} {values}; ms {milliseconds} (first {result.first_s:.1f} s, built in {result.build_s:.1f} s); "
        f"{speed:,.0f} tokens/s, MFU {mfu:.1%}, {result.peak_gib:.1f} GiB {result.note}"
    )


def table(results: Sequence[Result]) -> Table:
    """Return the table of all results."""
    columns = (
        "model",
        "data",
        "system",
        "ms",
        "spread",
        "useful tok/s",
        "computed tok/s",
        "MFU useful",
        "MFU computed",
    )
    more = ("peak GiB", "passes", "kernels/pass", "syncs/pass", "x composite")
    table = Table(*columns, *more)
    for result in results:
        head = (result.model, result.data, result.arm)
        if result.error or disagreement(result, results):
            table.add_row(*head, "failed" if result.error else "differs")
            continue
        seconds, passes = result.median_s, max(result.micro_batches, 1)
        ratio = _ratio(results, result, "composite")
        table.add_row(
            *head,
            f"{1000 * seconds:.0f}",
            f"{1000 * (max(result.seconds) - min(result.seconds)):.0f}",
            f"{result.tokens / seconds:,.0f}",
            f"{result.computed_tokens / seconds:,.0f}",
            f"{result.flops / seconds / PEAK_FLOPS:.1%}",
            f"{result.computed_flops / seconds / PEAK_FLOPS:.1%}",
            f"{result.peak_gib:.1f}",
            str(result.micro_batches),
            f"{result.kernels / passes:.0f}",
            f"{result.syncs / passes:.1f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    return table


def kernel_lines(result: Result) -> Iterator[str]:
    """Yield the longest kernels of one update."""
    yield f"{result.model} {result.data} {result.arm}: longest kernels (count, ms, share)"
    for name, count, milliseconds, share in result.longest_kernels:
        yield f"  {count:6d} {milliseconds:9.2f} {share:6.1%}  {name}"


def figures_and_goals(results: Sequence[Result]) -> tuple[dict[str, float], dict[str, Goal]]:
    """Return the figures of rlflow, and the goals; a goal without a figure is missed."""
    figures: dict[str, float] = {}
    for result in results:
        if result.arm == "rlflow" and not result.error and not disagreement(result, results):
            name = f"{result.model}/{result.data}"
            figures[f"{name}/tokens_per_second"] = result.tokens / result.median_s
            figures[f"{name}/mfu"] = result.computed_flops / result.median_s / PEAK_FLOPS
            for other, label in (("composite", "over_composite"), ("trl+liger", "over_trl_liger")):
                if (ratio := _ratio(results, result, other)) is not None:
                    figures[f"{name}/{label}"] = ratio
    least = {
        "0.5B/D1/over_composite": 1.15,
        "0.5B/D2/over_composite": 1.15,
        "0.5B/D3/over_composite": 1.6,
        "0.5B/D2/over_trl_liger": 2.0,
        "0.5B/D1/mfu": 0.28,
        "7B-slice/D1/mfu": 0.45,
    }
    goals = {name: Goal(f"at least {value:g}", figures.get(name, 0.0) >= value) for name, value in least.items()}
    return figures, goals


def _ratio(results: Sequence[Result], result: Result, other: str) -> float | None:
    """Return how many times as fast as the system ``other`` this one is; None without a time of it."""
    for peer in results:
        is_it = (peer.arm, peer.model, peer.data) == (other, result.model, result.data)
        if is_it and not peer.error and not disagreement(peer, results):
            return peer.median_s / result.median_s
    return None
