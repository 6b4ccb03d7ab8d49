"""One training step: a pass over the graph, and the new weights to the roles that follow."""

import time
from collections.abc import Mapping
from typing import Any

from rlflow.batch import Metrics, Rollouts, Sequences
from rlflow.errors import EngineError, NotFiniteError
from rlflow.nodes.minibatches import schedule_behind
from rlflow.runtime.agreement import check_sampler
from rlflow.runtime.finite import check_values
from rlflow.runtime.graph_runner import naming, note_times
from rlflow.runtime.measurements import figures_per_gpu
from rlflow.runtime.objects.store_usage import count_towards
from rlflow.runtime.training import Training

SKIPPED = "skipped_at/"
"""The metric of a skipped step is this and the name of the node whose values are not finite."""


def train_step(training: Training, step: int) -> dict[str, float]:
    """Run the graph once on the data of ``step``, sync the weights, and return the metrics.

    A step with values that are not finite ends there: it is skipped, and the roles that follow get the weights that the
    trained roles have. Metrics of time are named ``seconds``, ``per_second`` or ``mfu``.
    """
    start = time.perf_counter()
    engines = training.engines
    # The values with which the step begins.
    states = {path: state.metrics() for path, state in training.runner.states.items()}
    outputs = _StepOutputs(training, step)
    try:
        try:
            seconds = _run_nodes(training, step, outputs)
        except NotFiniteError as error:
            if training.skips is None:
                raise
            training.skips.add(step + 1, error, outputs.edges)
            outputs.skip(error)
            seconds = {}
        seconds["copy"] = training.sync(step + 1)
    except EngineError as error:
        raise EngineError(f"step {step + 1}: {error}") from error
    total = note_times(engines, "step", [(start, time.perf_counter())])
    figures = figures_per_gpu(training.plan, seconds, total, outputs.longest_edge) if outputs.longest_edge else {}
    return {
        **outputs.metrics,
        "tokens": outputs.tokens,
        "tokens_per_second": outputs.tokens / total,
        "seconds": total,
        **figures,
        **(training.work.take_utilization(seconds) if training.work else {}),
        **{f"seconds/{name}": value for name, value in seconds.items()},
        **engines.step_metrics(step + 1),
        **{f"{path.removeprefix('graph.')}/{name}": v for path, state in states.items() for name, v in state.items()},
    }


def _run_nodes(training: Training, step: int, outputs: "_StepOutputs") -> dict[str, float]:
    """Run the nodes of a step, and return the seconds of each. Raises NotFiniteError."""
    seconds: dict[str, float] = {}
    if training.start_of_step is not None:
        seconds, metrics = training.start_of_step.run(step, outputs.edges, outputs.add)
        outputs.metrics |= metrics
    else:
        data = training.data
        read = {"prompts": data.prompts, "examples": data.examples, "pairs": data.pairs}
        for name in training.graph.sources:
            with count_towards(name):
                outputs.edges[name] = read[name](step)
            outputs.add(name, outputs.edges[name])
    if outputs.edges:
        with schedule_behind(training.skips.count if training.skips else 0):
            seconds |= training.runner.run(training.graph, outputs.edges, outputs.add, ends_step=True)
    return seconds


class _StepOutputs:
    """The outputs of a step's nodes: those that later nodes read, and what the step reports about all of them."""

    def __init__(self, training: Training, step: int) -> None:
        self.edges: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.tokens = 0
        """The response tokens of all nodes that generate."""
        self.longest_edge = 0
        """The tokens of the longest output of sequences; 0 in a step that is skipped."""
        self._training, self._step = training, step

    def add(self, name: str, output: Any) -> None:
        """Check and measure an output. Raises NotFiniteError, and EngineError for a sampler of other logprobs."""
        with naming(name):
            check_values(output, self.edges.values())
            if isinstance(output, Metrics):
                check_sampler(self._training.plan, name, output, self.edges, self._step)
            self.metrics |= metrics_of(name, output)
        observer, samples = self._training.observer, self._training.samples
        if hasattr(output, "failures") and (failures := output.failures()):
            observer.failed(self._step + 1, name, failures)
        if samples is not None and (read := samples.read(self._step, name, output, self.edges)):
            observer.sampled(read)
        if isinstance(output, Sequences):
            # Pairs of responses that another node has generated count once.
            is_new = isinstance(output, Rollouts) or name in self._training.graph.sources
            self.tokens += int(output.own_lengths.sum()) if is_new else 0
            lengths = output.prompt_ids.lengths + output.response_ids.lengths
            self.longest_edge = max(self.longest_edge, int(lengths.sum()))

    def skip(self, error: NotFiniteError) -> None:
        """Drop the outputs of a step that is skipped. The times of a part of a step are comparable with nothing."""
        self.metrics[f"{SKIPPED}{error.node}"] = 1.0
        self.longest_edge = 0
        self.edges.clear()


def metrics_of(name: str, output: Any) -> dict[str, float]:
    """Return the metrics that the output of node ``name`` declares, as NODE/METRIC."""
    declared: Mapping[str, float] = output.metrics() if hasattr(output, "metrics") else {}
    return {f"{name}/{metric}": value for metric, value in declared.items()}
