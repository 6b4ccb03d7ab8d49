"""Changes that make a recipe fit a cluster. Each is found by planning again with it applied, so that it works."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlflow.compiler.problem import Pin, Problem
from rlflow.resources.cluster import MOST_GPUS, Cluster, Host
from rlflow.resources.planner.candidate import SearchResult

# Shorter responses are proposed down to this share of what the recipe asks for.
_LEAST_SHARE = 1 / 8
# The most additional hosts that are tried, and the hosts of eight GPUs that are tried in place of the cluster.
_MORE_HOSTS = 16
_LARGE_HOSTS = (1, 2, 4, 8, 16, 32)
# Numbers of GPUs are tried so far from a pinned one.
_AROUND = 16
# GiB of the largest GPU that is sold.
_LARGEST_GPU = 192


@dataclass(frozen=True)
class _Change:
    """A change, in the words of the command line where it has any, and the problem with it applied."""

    text: str
    changed: Problem


def fixes(problem: Problem, conflict: Sequence[Pin]) -> list[str]:
    """Return changes of which each makes the recipe fit: other pins, else shorter responses, or other hosts.

    ``conflict`` has the pins that conflict with each other, if any.
    """
    if conflict:
        single = [text for pin in conflict if (text := _repinned(problem, [pin]))]
        if single:
            return single
        if problem.without(problem.pins).fits() and (text := _repinned(problem, _to_open(problem))):
            return [text]
    reliefs = _reliefs(problem)
    if reliefs or not problem.pins:
        return [relief.text for relief in reliefs]
    both = []
    for relief in _reliefs(problem.without(problem.pins)):
        changed = relief.changed.with_pins(problem.pins)
        if text := _repinned(changed, _to_open(changed)):
            both.append(f"{text} {relief.text}" if "=" in relief.text else f"{text} and {relief.text}")
    return both


def _to_open(problem: Problem) -> list[Pin]:
    """Return a smallest set of pins without which the problem fits, given that it fits without any."""
    opened = problem.pins
    for pin in problem.pins:
        fewer = [other for other in opened if other != pin]
        if problem.without(fewer).fits():
            opened = fewer
    return opened


def _repinned(problem: Problem, pins: Sequence[Pin]) -> str | None:
    """Return other values for these pins that fit, as near to the pinned ones as possible; None if there are none."""
    best = problem.without(pins).best()
    if best is None:
        return None
    values = [_chosen(best, pin) for pin in pins]
    if not problem.with_pins(values).fits():
        values = [pin.opened for pin in pins]
    if len(pins) == 1:
        values = [_nearest(problem, pins[0], values[0])]
    return " ".join(map(str, values))


def _chosen(best: SearchResult, pin: Pin) -> Pin:
    """Return the pin with the value that a plan has, or open if that is the same."""
    chosen = best.candidate
    if pin.field == "gpus":
        value: object = chosen.gpus[chosen.pool_of[pin.role]]
    else:
        value = getattr(chosen.choices[pin.role].layout, pin.field, pin.value)
    return pin.opened if value in (None, pin.value) else replace(pin, value=value)


def _nearest(problem: Problem, pin: Pin, working: Pin) -> Pin:
    """Return the value nearest to the pinned one that fits, given one that works."""

    def fits(value: object) -> bool:
        return problem.with_pins([replace(pin, value=value)]).fits()

    wanted, good = pin.value, working.value
    # Replicas divide the ranks evenly, so a number between two that work need not work.
    if (
        pin.field == "num_replicas"
        or not isinstance(wanted, int | float)
        or not isinstance(good, int | float)
        or isinstance(wanted, bool)
    ):
        return working
    if pin.field == "gpus" or pin.field.endswith("_parallel_size"):
        # Only some numbers make groups, so that there is no order in which they fit.
        around = (int(wanted) + sign * distance for distance in range(1, _AROUND + 1) for sign in (-1, 1))
        if fitting := next((value for value in around if value > 0 and fits(value)), None):
            return replace(pin, value=fitting)
    grain = 0.01 if pin.field == "gpu_memory_utilization" else 1
    bad, best = round(wanted / grain), round(good / grain)
    while abs(best - bad) > 1:
        middle = (best + bad) // 2
        bad, best = (bad, middle) if fits(round(middle * grain, 2)) else (middle, best)
    near_by = round(best * grain, 2)
    return replace(pin, value=near_by) if near_by != good and fits(near_by) else working


def _reliefs(problem: Problem) -> list[_Change]:
    """Return changes other than of pins that make the recipe fit: less work for a GPU, or other hosts."""
    changes = [*_shorter(problem), *_more_hosts(problem)]
    return changes or list(_larger_hosts(problem))


def _shorter(problem: Problem) -> Iterator[_Change]:
    """Yield the longest responses that fit."""
    recipe = problem.recipe
    settings = {node.name: node.operation.sampling for node in problem.graph.nodes}
    limits = {name: sampling.max_tokens for name, sampling in settings.items() if sampling is not None}

    def limited(tokens: int) -> _Change:
        if not limits:
            expect = replace(recipe.expect, response_tokens=(float(tokens),))
            changed = replace(recipe, expect=expect)
            return _Change(f"expect.response_tokens=[{tokens}]", problem.with_recipe(changed))
        shortened = {name: min(tokens, limit) for name, limit in limits.items()}
        nodes = {name: {**node, "max_tokens": shortened[name]} for name, node in recipe.graph.items() if name in limits}
        text = " ".join(f"graph.{name}.max_tokens={shortened[name]}" for name in limits if limits[name] > tokens)
        return _Change(text, problem.with_recipe(replace(recipe, graph={**recipe.graph, **nodes})))

    longest = max(limits.values()) if limits else _longest_of_data(problem)
    low, high = max(1, int(longest * _LEAST_SHARE)), longest
    if not limited(low).changed.fits():
        return
    while high - low > max(16, longest // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if limited(middle).changed.fits() else (low, middle)
    round_number = low // 64 * 64
    yield next((change for change in (limited(round_number),) if round_number and change.changed.fits()), limited(low))


def _longest_of_data(problem: Problem) -> int:
    """Return the tokens of the longest response that the data may contain."""
    # A pinned micro-batch that is too small is an error of its own.
    tasks = problem.without(problem.pins).search().inputs.workload.tasks
    return max(task.longest // task.unit_size for task in tasks) - problem.recipe.data.max_prompt_tokens


def _more_hosts(problem: Problem) -> Iterator[_Change]:
    """Yield the smallest number of additional hosts that is enough, all equal to a host of the cluster."""
    cluster = problem.cluster
    kinds = {(host.gpu, host.labels): host for host in sorted(cluster.hosts, key=lambda host: len(host.usable))}
    for like in kinds.values():
        if like.reserved:
            continue
        with_more = partial(_with_hosts, problem, like)
        if count := _least(with_more, max(1, min(_MORE_HOSTS, MOST_GPUS // 64 // like.gpus))):
            changed = with_more(count)
            yield _Change(_hosts_in_words(changed.cluster, like, count), changed)
            return


def _least(changed: Callable[[int], Problem], limit: int) -> int:
    """Return the smallest number up to ``most`` whose problem fits; 0 if none does."""
    if not changed(limit).fits():
        return 0
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if changed(middle).fits() else (middle, high)
    return high


def _with_hosts(problem: Problem, like: Host, count: int) -> Problem:
    """Return the problem with more hosts like one of the cluster's, all of whose GPUs are free."""
    hosts = problem.cluster.hosts
    taken = {host.name for host in hosts}
    fresh = [name for n in range(len(hosts) + count) if (name := f"host-{n}") not in taken][:count]
    extra = tuple(replace(like, name=name, free=None) for name in fresh)
    return replace(problem, cluster=replace(problem.cluster, hosts=(*hosts, *extra)))


def _hosts_in_words(grown: Cluster, like: Host, count: int) -> str:
    """Describe additional hosts: as a shape, or in words where a shape cannot describe the hosts."""
    if all(host == Host(name=f"host-{n}", gpus=host.gpus, gpu=host.gpu) for n, host in enumerate(grown.hosts)):
        return f"cluster={grown.shape}"
    return f"{count} more host{'s' if count > 1 else ''} like {like.name} with all {like.gpus} GPUs free"


def _larger_hosts(problem: Problem) -> Iterator[_Change]:
    """Yield hosts of eight GPUs in place of the cluster, as few as possible, with the smallest memory that fits."""
    kind = max(problem.cluster.hosts, key=lambda host: host.gpus).gpu
    if problem.cluster.gpus[kind].memory_gib is None:
        return
    for count in _LARGE_HOSTS:
        with_memory = partial(_on_hosts_of_8, problem, kind, count)
        if memory := _least(with_memory, _LARGEST_GPU):
            hosts = f"{count} hosts" if count > 1 else "1 host"
            yield _Change(f"{hosts} of 8 GPUs with {memory} GiB each", with_memory(memory))
            return


def _on_hosts_of_8(problem: Problem, kind: str, count: int, memory: int) -> Problem:
    hosts = tuple(Host(name=f"host-{number}", gpus=8, gpu=kind) for number in range(count))
    gpu = replace(problem.cluster.gpus[kind], memory_gib=float(memory))
    return replace(problem, cluster=Cluster(hosts=hosts, gpus={kind: gpu}))
