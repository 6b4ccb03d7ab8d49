"""A run that is ready for its next step: its graph as it runs, and all that the steps need beside it.

The plan's graph is rewritten for what a recipe asks of its steps. Each rewrite takes nodes out of the graph that do not
run once in every step, and says what runs them instead.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlflow.compiler.graph import Graph, resampled_nodes
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.errors import NotFiniteError
from rlflow.runtime.evaluation import Evaluator, PausingEvaluator, evaluator_of
from rlflow.runtime.generation.ahead_own_gpus import AheadOnOwnGpus
from rlflow.runtime.generation.ahead_shared_gpus import AheadOnSharedGpus
from rlflow.runtime.generation.resampling import ResamplingRounds
from rlflow.runtime.graph_runner import GraphRunner, OnOutput, note_times
from rlflow.runtime.protocols import Engines, Observer
from rlflow.runtime.samples import SampleReader
from rlflow.runtime.utilization import UpdateWork


class Skips(Protocol):
    """The steps of a run that are skipped, because some of their values are not finite."""

    @property
    def count(self) -> int:
        """Return their number so far."""

    def add(self, step: int, error: NotFiniteError, edges: Mapping[str, Any]) -> None:
        """Skip a step, counted from 1, and save what is on its edges. Raises EngineError if the run has to end."""


class StepStart(Protocol):
    """The part of a step before the rest of its graph: it generates in rounds, or has been generated before."""

    @property
    def path(self) -> str:
        """Return the path in the recipe under which checkpoints save it."""

    def run(self, step: int, edges: dict[str, Any], on_output: OnOutput) -> tuple[dict[str, float], dict[str, float]]:
        """Put the outputs that the rest needs into ``edges``; return the seconds of each node, and metrics."""

    def save(self, folder: Path) -> None:
        """Save what the next step needs."""

    def restore(self, folder: Path) -> None:
        """Restore what ``save`` saved."""

    def close(self) -> None:
        """Run nothing more."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run that is ready for its next step."""

    plan: Plan
    engines: Engines
    data: DataSource
    runner: GraphRunner
    """Runs the nodes of the plan's graph."""
    graph: Graph
    """The nodes that run once in each step, after its start."""
    start_of_step: StepStart | None = None
    """The nodes that run in rounds, or ahead of their step."""
    sync: Callable[[int], float]
    """Syncs the weights of a version to the roles that follow, and returns the seconds that it took."""
    evaluator: Evaluator | None = None
    observer: Observer = field(default_factory=Observer)
    """Gets reasons why samples could not be judged, and samples to read."""
    samples: SampleReader | None = None
    skips: Skips | None = None
    """Takes note of steps whose values are not finite; without it, such a step is an error."""
    work: UpdateWork | None = None
    """The work of updates, from which their MFU follows."""

    @staticmethod
    def of(plan: Plan, engines: Engines, data: DataSource) -> "Training":
        """Return the training of a plan on these engines, before its first step."""
        runner = GraphRunner(plan.graph, engines)
        evaluation, eval_split = plan.recipe.evaluation, plan.recipe.data.eval_split
        training = Training(
            plan=plan,
            engines=engines,
            data=data,
            runner=runner,
            graph=plan.graph,
            sync=partial(sync_followers, plan, engines),
            evaluator=evaluator_of(plan.graph, runner, evaluation, eval_split) if evaluation else None,
        )
        for rewrite in _REWRITES:
            training = rewrite(training)
        return training

    @property
    def trained(self) -> dict[str, Any]:
        """Return the engines of the trained roles."""
        return {role: self.engines[role] for role in self.plan.graph.trained_roles()}

    @property
    def saved(self) -> dict[str, Any]:
        """Return all that checkpoints save and restore, by the name of its folder."""
        start = {} if self.start_of_step is None else {self.start_of_step.path: self.start_of_step}
        return {**self.trained, **self.runner.states, **start}


def _generate_in_rounds(training: Training) -> Training:
    """Run the nodes up to the one that selects prompts in rounds, on prompts that it may draw."""
    if not (nodes := resampled_nodes(training.graph)):
        return training
    rounds = ResamplingRounds(nodes, training.plan.recipe, training.data, training.runner.run)
    return replace(training, graph=training.graph.without(nodes), start_of_step=rounds)


def _generate_ahead(training: Training) -> Training:
    """Run the nodes that generate, and those that judge their samples, ahead of their step (``overlap``)."""
    plan = training.plan
    if not plan.recipe.overlap.max_staleness:
        return training
    form = AheadOnSharedGpus if plan.takes_turns else AheadOnOwnGpus
    ahead = form(training.graph, plan.recipe, training.engines, training.data, training.runner.run, training.sync)
    return replace(
        training,
        graph=training.graph.without(ahead.nodes),
        start_of_step=ahead,
        sync=ahead.sync,
        evaluator=training.evaluator and PausingEvaluator(training.evaluator, ahead.paused),
    )


_REWRITES: Sequence[Callable[[Training], Training]] = (_generate_in_rounds, _generate_ahead)


def sync_followers(plan: Plan, engines: Engines, version: int) -> float:
    """Sync the weights of trained roles to the roles that follow them, and return the seconds it took."""
    start = time.perf_counter()
    for sync in plan.workload.weight_syncs:
        engines[sync.target].load_weights(engines[sync.source].weights(), version)
    return note_times(engines, "copy", [(start, time.perf_counter())])
