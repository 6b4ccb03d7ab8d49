"""The evaluation section of a recipe, and the metrics of a model's rewards on held-out rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import comb
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from rlflow.schema import Count, Section, Steps, Temperature, Text, TopP

PREFIX = "evaluation/"
"""The beginning of the names of all metrics of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(Section):
    """A named set of held-out rows. Options that it leaves out are those of the rows of ``data.eval_split``."""

    split: Text
    """The split of the data set."""
    source: Text | None = None
    """A data set of its own, as in ``data.source``. Then ``name``, ``options`` and ``columns`` are its own too."""
    name: str | None = None
    """The configuration of a data set on the hub."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a function."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The data set's column for each name used here, as in ``data.columns``."""
    num_prompts: Count | None = None
    """The number of rows, taken from the beginning of the split."""
    num_responses: Count | None = None
    """Responses to each prompt."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Evaluation on held-out rows: responses scored by the graph's reward, or the accuracy on pairs.

    The accuracy is the share of pairs whose chosen response the model prefers.
    """

    every: Steps
    """Steps between two evaluations. The first is before training and the last after it."""
    num_prompts: Count
    """The number of held-out rows, taken from the beginning of the split."""
    num_responses: Count = 1
    """Responses to each prompt. A single one has the likeliest tokens; several are sampled, for mean@k and pass@k."""
    temperature: Temperature | None = None
    """The temperature of several responses, by default that of training."""
    top_p: TopP | None = None
    """The ``top_p`` of several responses, by default that of training."""
    pass_reward: Annotated[float, Ge(-1e9), Le(1e9)] = 1.0
    """The reward from which on a response passes, for pass@k."""
    patience: Count | None = None
    """The number of evaluations in a row without a new best after which the run ends, as after its last step."""
    sets: Mapping[str, EvaluationSet] = field(default_factory=dict)
    """Further held-out rows by name, each with metrics of its own: ``evaluation/NAME/...``."""

    def sets_with(self, eval_split: str | None) -> dict[str, EvaluationSet]:
        """Return all sets by name: first the rows of ``data.eval_split``, if there are any, whose name is empty."""
        main = {} if eval_split is None else {"": EvaluationSet(split=eval_split)}
        return main | dict(self.sets)

    def prompts_of(self, held_out: EvaluationSet) -> int:
        """Return the number of prompts of a set."""
        return held_out.num_prompts or self.num_prompts

    def responses_of(self, held_out: EvaluationSet) -> int:
        """Return the number of responses to each prompt of a set."""
        return held_out.num_responses or self.num_responses

    def figure(self, eval_split: str | None, measured: str) -> str:
        """Return the name of the metric that stands for an evaluation: mean reward or accuracy on the first set.

        ``measured`` is "reward" or "accuracy".
        """
        name, first = next(iter(self.sets_with(eval_split).items()))
        return metric_name(name, mean_metric(self.responses_of(first)) if measured == "reward" else measured)


def metric_name(evaluation_set: str, metric: str) -> str:
    """Return the name of a metric of an evaluation set; the set of ``data.eval_split`` has no name."""
    return f"{PREFIX}{evaluation_set}/{metric}" if evaluation_set else f"{PREFIX}{metric}"


def mean_metric(num_responses: int) -> str:
    """Return the name of the mean reward of so many responses to each prompt."""
    return "reward" if num_responses == 1 else f"mean_at_{num_responses}"


def pass_metrics(
    rewards: NDArray[np.floating[Any]], prompts: NDArray[np.integer[Any]], least: float
) -> dict[str, float]:
    """Return pass@k for every k that is a power of two, and for the most responses to a prompt.

    ``rewards`` [B] are NaN for responses that could not be judged, which do not count; ``prompts`` [B] are the numbers
    of their prompts. A response passes with a reward of ``least`` or more. Prompts with fewer than k judged responses
    are left out of pass@k.
    """
    judged = ~np.isnan(rewards)
    size = int(prompts.max()) + 1
    numbers = np.bincount(prompts[judged], minlength=size).tolist()
    passed = np.bincount(prompts[judged], rewards[judged] >= least, minlength=size).astype(int).tolist()
    largest = max(numbers)
    ks = sorted({2**power for power in range(largest.bit_length())} | {largest} - {0})
    shares = {
        k: [pass_at_k(number, passes, k) for number, passes in zip(numbers, passed, strict=True) if number >= k]
        for k in ks
    }
    return {f"pass_at_{k}": fmean(values) for k, values in shares.items()}


def pass_at_k(number: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passes, drawn from ``number`` of which ``passed`` do.

    It is the unbiased estimator of Chen et al. (arXiv 2107.03374).
    """
    return 1.0 - comb(number - passed, k) / comb(number, k)
