"""The error for a recipe that does not fit a cluster: the pins that conflict, what the roles lack, and fixes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import floor

from rlflow.compiler.fixes import fixes
from rlflow.compiler.plan import NOTHING_FITS, plan
from rlflow.compiler.problem import Pin, Problem
from rlflow.errors import PlacementError
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import Shortage

# GiB with which no role lacks memory.
_PLENTY = 2**20


def infeasible_error(problem: Problem, raised: PlacementError) -> PlacementError:
    """Return the error with a reason and fixes that planning again confirms, for the error that planning raised."""
    if raised.path.endswith(".dtype"):
        raised.notes["Fix"] = _fix_of_type(problem, raised.path)
        return raised
    conflict = _conflicting_pins(problem)
    changes = _fixes(problem, conflict)
    alone = problem.without([pin for pin in problem.pins if pin not in conflict])
    if not _is_about(raised, conflict):
        raised = _refusal(alone) or raised
    path, fact = raised.path, raised.fact
    if not _is_about(raised, conflict):
        role, lack = _lack(alone)
        path = conflict[0].path if conflict else f"roles.{role}" if role else NOTHING_FITS
        what = f"{conflict[0].text} does not fit" if conflict else "nothing fits"
        if len(conflict) > 1:
            what = f"{' and '.join(map(str, conflict))} conflict on"
        fact = f"{what} {problem.cluster.shape}" + (f" ({lack})" if lack else "")
    total = sum(len(host.usable) for host in problem.cluster.hosts)
    fix = ", or ".join(changes) or raised.notes["Fix"]
    error = PlacementError(path, fact, free=f"{total} GPU{'s' if total > 1 else ''}", fix=fix)
    error.notes["Known"] = raised.notes["Known"]
    return error


def _fix_of_type(problem: Problem, path: str) -> str:
    """Return the changes with which a model that no GPU can compute has a plan in float32; ``path`` is its type's."""
    name, models = path.split(".")[1], problem.recipe.models
    changed = problem.with_recipe(
        replace(problem.recipe, models={**models, name: replace(models[name], dtype="float32")})
    )
    try:
        plan(changed, changed.search())
    except PlacementError as error:
        fixes = str(infeasible_error(changed, error).notes["Fix"]).split(", or ")
        return ", or ".join(f"{path}=float32{' and' if fix[0].isdigit() else ''} {fix}" for fix in fixes)
    return f"{path}=float32"


def safer_changes(problem: Problem) -> tuple[str, ...]:
    """Return changes of which each makes a tight plan safe."""
    problem = replace(problem, margin=Margin.SAFE)
    return tuple(fixes(problem, _conflicting_pins(problem)))


def _fixes(problem: Problem, conflict: Sequence[Pin]) -> list[str]:
    """Return changes that give a safe plan; and those that give a tight one, if a safe one needs other hosts."""
    levels = {margin: replace(problem, margin=margin) for margin in Margin}
    if conflict:
        # The pins are all that is wrong.
        return fixes(next(level for level in levels.values() if level.without(problem.pins).fits()), conflict)
    safe = fixes(levels.pop(Margin.SAFE), conflict)
    if any("=" in text for text in safe):
        return safe
    tight = next((changes for level in levels.values() if (changes := fixes(level, conflict))), [])
    return [*safe, *(f"{text} (tight)" for text in tight if text not in safe)]


def _conflicting_pins(problem: Problem) -> list[Pin]:
    """Return a smallest set of pins that conflict; empty where the recipe does not fit without any pin either."""
    pins = problem.pins
    if not pins or not problem.without(pins).fits():
        return []
    conflict = list(pins)
    for pin in pins:
        fewer = [other for other in conflict if other != pin]
        if not problem.without([other for other in pins if other not in fewer]).fits():
            conflict = fewer
    return conflict


def _is_about(raised: PlacementError, conflict: Sequence[Pin]) -> bool:
    """Return whether an error names a pin of the conflict or its role, or what no pin has to do with."""
    if raised.path == NOTHING_FITS or not conflict:
        return raised.path != NOTHING_FITS
    return raised.path in {pin.path for pin in conflict} | {f"roles.{pin.role}" for pin in conflict}


def _refusal(problem: Problem) -> PlacementError | None:
    """Return the error of pins that contradict themselves or the engine; None where only the search finds nothing."""
    try:
        problem.search().best()
    except PlacementError as error:
        return error
    return None


def _lack(problem: Problem) -> tuple[str | None, str]:
    """Return what the roles lack, and the role that lacks it in most plans that nearly fit: memory, or whole groups.

    Of GPU and host memory, it is the one of which less more would do.
    """
    cluster = problem.cluster
    gpus = [gib for host in cluster.hosts if (gib := cluster.memory_gib(host)) is not None]
    hosts = [host.memory_gib for host in cluster.hosts if host.memory_gib is not None]
    needs = []
    for what, having, sizes in (
        ("GPUs with at least {} GiB", _with_gpu_memory, gpus),
        ("hosts with at least {} GiB of memory", _with_host_memory, hosts),
    ):
        if not sizes or not having(problem, _PLENTY).fits():
            continue
        low, high = floor(min(sizes)), _PLENTY
        while high - low > max(1, low // 64):
            middle = (low + high) // 2
            low, high = (low, middle) if having(problem, middle).fits() else (middle, high)
        needs.append((high / min(sizes), what.format(high), having(problem, low)))
    if not needs:
        return _missing_groups(_with_gpu_memory(problem, _PLENTY))
    _, what, nearly = min(needs, key=lambda need: need[0])
    # Any role lacks memory in some plan, as where it has a single GPU.
    rejected = _shortages(nearly)
    times = Counter(shortage.role for shortage in rejected)
    role = min(rejected, key=lambda shortage: (-times[shortage.role], shortage.gib)).role
    nearest = min(_shortages(problem), key=lambda shortage: (shortage.role != role, shortage.gib))
    return role, f"{role} needs {what}; predicted: {nearest.what}"


def _with_gpu_memory(problem: Problem, gib: int) -> Problem:
    """Return the problem with at least so much memory on each GPU."""
    gpus = {
        kind: gpu if gpu.memory_gib is None else replace(gpu, memory_gib=max(gpu.memory_gib, float(gib)))
        for kind, gpu in problem.cluster.gpus.items()
    }
    return replace(problem, cluster=replace(problem.cluster, gpus=gpus))


def _with_host_memory(problem: Problem, gib: int) -> Problem:
    """Return the problem with at least so much memory on each host that states its own."""
    hosts = tuple(
        host if host.memory_gib is None else replace(host, memory_gib=max(host.memory_gib, float(gib)))
        for host in problem.cluster.hosts
    )
    return replace(problem, cluster=replace(problem.cluster, hosts=hosts))


def _shortages(problem: Problem) -> list[Shortage]:
    """Return why each plan of a problem that has none was rejected."""
    search = problem.search()
    search.fits()
    return [rejected.shortage for rejected in search.rejected]


def _missing_groups(problem: Problem) -> tuple[str | None, str]:
    """Return why a role cannot have its groups of GPUs in the largest pool that was tried for it."""
    search = problem.search()
    try:
        search.fits()
    except PlacementError:
        return None, ""
    rejected = [
        (count, candidate.shortage)
        for candidate in search.rejected
        for roles, count in zip(candidate.partition, candidate.gpus, strict=True)
        if candidate.shortage.role in roles
    ]
    if not rejected:
        return None, ""
    _, shortage = max(rejected, key=lambda candidate: candidate[0])
    return shortage.role, str(shortage)
