"""The alternatives to a plan: other ways to share GPUs, and what each of them costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.resources.planner.candidate import Candidate, RejectedCandidate, SearchResult
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Partition, describe_pools
from rlflow.resources.planner.prediction.overlap_prediction import step_seconds


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to share GPUs, and what it costs."""

    what: str
    step_seconds: float | None
    """None: it does not fit."""
    loses: str


def find_alternatives(inputs: PlannerInputs, result: SearchResult, step: float) -> tuple[Alternative, ...]:
    """Return the best of every other way to share, fastest first; then the ways that do not fit."""
    chosen = result.candidate
    best: dict[Partition, Candidate] = {}
    for other in result.alternatives:
        if other.partition != chosen.partition or other.used_gpus < chosen.used_gpus:
            best.setdefault(other.partition, other)
    times = {way: step_seconds(other, inputs) for way, other in best.items()}
    alternatives = []
    for way, other in sorted(best.items(), key=lambda entry: (entry[1].margin, times[entry[0]])):
        slower = times[way] / step - 1 if step else 0.0
        idle = max(other.schedule.idle_share(index) for index in range(len(way)))
        cost = "equally fast" if other.used_gpus == chosen.used_gpus else f"uses {other.used_gpus} GPUs"
        loses = f"{slower:.0%} slower" if slower >= 0.005 else cost
        loses += f", idle {idle:.0%}" if len(way) > 1 else ""
        loses += ", tight" if other.margin > chosen.margin else ""
        what = describe_pools(way, other.gpus)
        alternatives.append(Alternative(what=what, step_seconds=times[way], loses=loses))
    for rejected in _nearest(result.rejected):
        if rejected.partition not in {*best, chosen.partition}:
            what = describe_pools(rejected.partition, rejected.gpus)
            alternatives.append(Alternative(what=what, step_seconds=None, loses=str(rejected.shortage)))
    return tuple(alternatives)


def _nearest(rejected: Sequence[RejectedCandidate]) -> list[RejectedCandidate]:
    """Return, for every way to share, the rejected candidate with the smallest shortage."""
    nearest: dict[object, RejectedCandidate] = {}
    for one in rejected:
        if one.partition not in nearest or one.shortage.gib < nearest[one.partition].shortage.gib:
            nearest[one.partition] = one
    return list(nearest.values())
