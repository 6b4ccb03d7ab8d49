"""The prediction of steps whose samples are generated ahead, for several values of ``overlap.max_staleness``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.resources.planner.candidate import Candidate
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.overlap import (
    Decoding,
    OverlapTimes,
    alone_seconds,
    simulate_overlap,
    simulate_turns,
)
from rlflow.resources.planner.prediction.task_times import DecodeProfile, decode_profile
from rlflow.resources.workload import Ahead, Task

# Values of ``max_staleness`` that are compared; the smallest whose step is longer than the best by at most this share
# is recommended.
_TRIED = (0, 1, 2, 4, 8)
_NEARLY_BEST = 0.05


@dataclass(frozen=True, kw_only=True)
class OverlapPrediction:
    """The predicted overlap of generation and training on the plan's GPUs."""

    step_seconds: float
    generate_idle: float
    """The idle share of the GPUs that generate."""
    train_idle: float
    """The idle share of the others."""
    staleness: float
    """The mean number of versions by which the policy that generated a token is older than the one that it trains."""
    by_staleness: Mapping[str, float]
    """The seconds of a step for other values of ``max_staleness``; 0 is a synchronous run on the same GPUs."""
    recommended: int
    """The smallest of these values whose step is at most 5% longer than the shortest."""
    takes_turns: bool = False
    """Generation and training take turns on shared GPUs."""

    def idle_share(self, candidate: Candidate, pool: int, inputs: PlannerInputs) -> float:
        """Return the share of a step in which a pool does nothing."""
        ahead = inputs.workload.ahead.nodes if inputs.workload.ahead else ()
        if any(task.role in candidate.partition[pool] for task in inputs.workload.tasks if task.node in ahead):
            return self.generate_idle
        busy = sum(span.seconds for span in candidate.schedule.spans if pool in span.pools)
        return max(0.0, 1 - busy / self.step_seconds)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Describe how idle both sides are, and what another bound on the staleness would change."""
        idle = f"idle: the side that generates {self.generate_idle:.0%}, the other {self.train_idle:.0%}"
        if self.takes_turns:
            idle = "generation and training take turns on shared GPUs"
        steps = [f"{staleness}: {seconds:.4g} s" for staleness, seconds in self.by_staleness.items()]
        return (
            f"{idle}; tokens are {self.staleness:.1f} versions old on average",
            f"step by max_staleness, 0 being synchronous: {', '.join(steps)}; within 5% of the best from "
            f"{self.recommended}",
        )


def step_seconds(candidate: Candidate, inputs: PlannerInputs) -> float:
    """Return the length of a step, simulated where samples are generated ahead."""
    overlap = predict_overlap(candidate, inputs, stalenesses=())
    return overlap.step_seconds if overlap else candidate.schedule.step_seconds


def predict_overlap(
    candidate: Candidate, inputs: PlannerInputs, stalenesses: Sequence[int] = _TRIED
) -> OverlapPrediction | None:
    """Simulate steps, also with ``stalenesses`` in place of the recipe's ``max_staleness``.

    None where nothing runs ahead, or its times are not modelled.
    """
    ahead = inputs.workload.ahead
    if ahead is None:
        return None
    generating = [task for task in inputs.workload.tasks if task.kind == "generate" and task.node in ahead.nodes]
    if len(generating) != 1 or (decoding := _decoding(candidate, inputs, generating[0], ahead)) is None:
        return None
    turns = inputs.workload.takes_turns({role: (pool,) for role, pool in candidate.pool_of.items()})
    spans = candidate.schedule.spans
    syncs = {sync.node for sync in inputs.workload.weight_syncs}
    train = max((span.end for span in spans if span.node not in syncs and span.node not in ahead.nodes), default=0.0)
    if turns:
        train = max(0.0, train - max(span.end for span in spans if span.node in ahead.nodes))
    sync = sum(span.seconds for span in spans if span.node in syncs)
    asked = ahead.overlap.max_staleness
    tried = {k: replace(ahead.overlap, max_staleness=k) for k in sorted({*stalenesses, asked})}
    simulate = simulate_turns if turns else simulate_overlap
    simulated = {}
    for k, overlap in tried.items():
        # Several steps may fill more places than one has samples.
        steps = k + 1 if turns or overlap.in_flight != "wait" else 1
        slots = _profile(candidate, inputs, replace(generating[0], steps=steps)).slots
        simulated[k] = simulate(replace(decoding, slots=slots), train, sync, overlap)
    chosen: OverlapTimes = simulated[asked]
    best = min(times.step_seconds for times in simulated.values())
    return OverlapPrediction(
        step_seconds=chosen.step_seconds,
        generate_idle=chosen.generate_idle,
        train_idle=chosen.train_idle,
        staleness=chosen.staleness,
        by_staleness={str(k): times.step_seconds for k, times in simulated.items()},
        recommended=next(k for k, times in simulated.items() if times.step_seconds <= (1 + _NEARLY_BEST) * best),
        takes_turns=turns,
    )


def _decoding(candidate: Candidate, inputs: PlannerInputs, task: Task, ahead: Ahead) -> Decoding | None:
    """Return the generation of a step, as long in total as its node in the plan; None without a modelled time."""
    spans = {span.node: span for span in candidate.schedule.spans}
    seconds = spans[task.node].seconds
    if inputs.demands[str(task.role)].architecture is None or not seconds:
        return None
    planned = inputs.workload.at_once(task, candidate.pool_roles(str(task.role)))
    profile = _profile(candidate, inputs, planned)

    def decoding(steps: int, scale: float) -> Decoding:
        return Decoding(
            samples=steps * task.samples,
            slots=profile.slots,
            lengths=profile.steps.values,
            token_seconds=lambda active: scale * profile.step_seconds(active),
            prefill=steps / planned.steps * scale * profile.prefill,
            prefill_token=scale * profile.prefill_step,
            judging=max(spans[node].end for node in ahead.nodes) - spans[task.node].end,
        )

    unscaled = decoding(planned.steps, 1.0)
    return decoding(1, planned.steps * seconds / (alone_seconds(unscaled) - unscaled.judging))


def _profile(candidate: Candidate, inputs: PlannerInputs, task: Task) -> DecodeProfile:
    """Return the speed of the role's engines for this task."""
    role = str(task.role)
    demand, choice = inputs.demands[role], candidate.choices[role]
    speed = inputs.host_set([role]).speed.of_engine(demand.engine)
    return decode_profile(demand, task, choice.layout, speed, choice.kv_tokens)
