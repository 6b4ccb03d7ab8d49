"""Steps that ask for more prompts, against a plain loop over the data's prompts, one at a time."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import rlflow
from rlflow.batch import Metrics, Minibatch
from rlflow.compiler.graph import resampled_nodes
from rlflow.compiler.lower import lower
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.compiler.wire import wire
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.base import Sampling, TokenLoss
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.fake import FakeEngine
from rlflow.errors import GraphError, RecipeError
from rlflow.report.records import MetricsWriter
from rlflow.runtime.generation.resampling import ResamplingRounds
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load, metrics_of, spec

BATCH, GROUP, STEPS = 4, 3, 5


def begins_low(texts: Sequence[str], rows: Any) -> list[float]:
    """Reward a low first digit, in which the responses to a prompt mostly differ."""
    return [float(text[:1] < "3") for text in texts]


def prompt_begins_low(texts: Sequence[str], rows: Any) -> list[float]:
    return [float(row["prompt"] < "3") for row in rows]


def all_alike(texts: Sequence[str], rows: Any) -> list[float]:
    return [1.0] * len(texts)


@cache
def plan_of(reward: str, *overrides: str, recipe: str = "fake") -> Plan:
    given = [
        *(f"recipe={recipe}", f"steps={STEPS}", f"data.batch_size={BATCH}", f"graph.rollouts.group_size={GROUP}"),
        f"graph.rewards.function='{__name__}:{reward}'",
        *("+graph.sampling={node: dynamic_sampling}", "checkpoints.every=1", *overrides),
    ]
    return rlflow.compile(load(*given, config_dir=CONFIG_DIR), "local")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps, without those of evaluations."""
    return [line for line in metrics_of(folder) if "sampling/rounds" in line]


def data_of(plan: Plan) -> DataSource:
    models = models_in_use(plan.recipe)
    rows = load_rows(plan.recipe.data, "split")
    return open_training_data(plan.recipe.data, load_tokenizer("policy", models["policy"]), rows, 0)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Minibatch]:
    """Return a list that receives each minibatch of the fake engine."""
    seen: list[Minibatch] = []
    update = FakeEngine.update

    def noted(self: FakeEngine, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        seen.append(minibatch)
        return update(self, minibatch, loss)

    monkeypatch.setattr(FakeEngine, "update", noted)
    return seen


@pytest.mark.slow
def test_the_first_prompts_that_differ_are_trained_on(trained: list[Minibatch], tmp_path: Path) -> None:
    plan = plan_of("begins_low", "checkpoints.keep=9")
    run(plan, tmp_path, LocalRuntime(), [MetricsWriter()])
    data, engine, said = data_of(plan), FakeEngine(spec()), metrics(tmp_path)
    saved = tmp_path / "checkpoints"
    places = [json.loads((saved / f"step-{n:06d}/graph.sampling/place.json").read_text()) for n in range(1, STEPS + 1)]
    for step, (first, end) in enumerate(pairwise([0, *places])):
        differing, prompts = [], []
        for number in range(end - first):
            prompt = data.prompts_from(first + number, step, number, 1)
            out = engine.generate(prompt, Sampling(max_tokens=4, group_size=GROUP))
            if len(set(begins_low(out.texts, out.rows))) > 1:
                differing.append(out.keys.tolist())
                prompts.append(prompt.ids[0].tolist())
        minibatch = trained[step]
        assert minibatch.keys.tolist() == [key for keys in differing[:BATCH] for key in keys]
        ids = [minibatch.prompt_ids[row].tolist() for row in range(len(minibatch))]
        assert ids == [row for row in prompts[:BATCH] for _ in range(GROUP)]
        assert (minibatch.columns["advantages"].values != 0).all()
        assert said[step]["sampling/differing"] == len(differing) / (end - first)
        assert said[step]["sampling/missing"] == 0
    assert max(step["sampling/rounds"] for step in said) > 1


@pytest.mark.parametrize(
    ("answered", "found", "count"),
    [(0, 0, 100), (300, 0, 100), (100, 50, 100), (100, 80, 25), (100, 75, 34), (200, 99, 25), (100, 10, 100)],
)
def test_as_many_as_are_missing_take(answered: int, found: int, count: int) -> None:
    """A round for a batch of 100 has at least a quarter of it."""
    plan = plan_of("begins_low", "data.batch_size=100")
    rounds = ResamplingRounds(resampled_nodes(plan.graph), plan.recipe, Mock(), Mock())
    assert rounds._round_size(answered, found) == count


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["dynamic_sampling", "curriculum, max_rounds: 3"])
def test_stopped_and_resumed_it_is_the_same_to_the_bit(sampling: str, tmp_path: Path) -> None:
    plan = plan_of("begins_low", f"graph.sampling={{node: {sampling}}}", recipe="real")
    run(plan, tmp_path / "whole", LocalRuntime(), [MetricsWriter()])
    assert {step["sampling/rounds"] for step in metrics(tmp_path / "whole")} != {1}
    folder, asked = tmp_path / "stopped", iter([False, False, True])
    run(plan, folder, LocalRuntime(), [MetricsWriter()], stop=lambda: next(asked))
    run(plan, folder, LocalRuntime(), [MetricsWriter()], resume=True)
    assert metrics(folder) == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_a_curriculum_learns_of_the_rows_that_it_has_drawn(trained: list[Minibatch], tmp_path: Path) -> None:
    """The reward of a row is its first digit's, so the success of each is known."""
    plan = plan_of("prompt_begins_low", "graph.sampling={node: curriculum}")
    run(plan, tmp_path, LocalRuntime(), [MetricsWriter()])
    place = json.loads((tmp_path / f"checkpoints/step-{STEPS:06d}/graph.sampling/place.json").read_text())
    rows = load_rows(plan.recipe.data, "split")
    is_low = [rows[row]["prompt"] < "3" for row in place["known"]]
    assert [estimate > 0 for estimate in place["rows"]] == is_low
    assert set(is_low) == {True, False}
    prompts = {tuple(batch.prompt_ids[row].tolist()) for batch in trained for row in range(len(batch))}
    assert len(prompts) == len(place["known"]) <= STEPS * BATCH
    shares = [step["sampling/expected"] for step in metrics(tmp_path)]
    assert len(shares) == STEPS


@pytest.mark.slow
def test_after_max_rounds_a_step_trains_on_fewer_prompts(trained: list[Minibatch], tmp_path: Path) -> None:
    run(plan_of("begins_low", "graph.sampling.max_rounds=1"), tmp_path, LocalRuntime(), [MetricsWriter()])
    said = metrics(tmp_path)
    assert [step["sampling/rounds"] for step in said] == [1] * STEPS
    missing = [step["sampling/missing"] for step in said]
    assert [len(minibatch) for minibatch in trained] == [(BATCH - few) * GROUP for few in missing if few < BATCH]
    assert any(0 < few < BATCH for few in missing)


@pytest.mark.slow
def test_without_differing_rewards_nothing_is_trained(trained: list[Minibatch], tmp_path: Path) -> None:
    plan = plan_of("all_alike", "graph.sampling.max_rounds=3")
    report = run(plan, tmp_path, LocalRuntime(), [MetricsWriter()])
    assert report.status == "finished"
    assert not trained
    for step in metrics(tmp_path):
        assert (step["sampling/rounds"], step["sampling/missing"], step["sampling/differing"]) == (3, BATCH, 0)
        assert step["rewards/mean"] == 1, "of all that were answered"
        assert "update/loss" not in step


def test_more_rounds_are_planned_where_they_are_expected() -> None:
    once, thrice = (
        {task.node: task.samples for task in lower(plan.recipe, plan.graph).workload.tasks}
        for plan in (plan_of("begins_low"), plan_of("begins_low", "expect.rounds=3"))
    )
    for node in ("rollouts", "rewards", "sampling"):
        assert thrice[node] == 3 * once[node] == 3 * BATCH * GROUP
    for node in ("reference", "advantages", "update"):
        assert thrice[node] == once[node] == BATCH * GROUP


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+graph.other={node: dynamic_sampling}", "graph.other: other and sampling would each choose the prompts"),
        (
            "+graph.fit={node: sft_update, role: actor}",
            "graph.fit: it reads all examples of a step, and graph.sampling",
        ),
    ],
)
def test_nodes_that_cannot_run_in_rounds(override: str, message: str) -> None:
    with pytest.raises(GraphError) as raised:
        plan_of("begins_low", override)
    assert str(raised.value).startswith(message)


def test_a_coefficient_does_not_change_within_a_step() -> None:
    nodes = [
        "+graph.kl={node: kl_divergence}",
        "+graph.penalized={node: kl_penalty, kl_coef: 0.1, kl_target: 1.0}",
        "graph.sampling.rewards=penalized",
        "graph.advantages.rewards=penalized",
    ]
    with pytest.raises(GraphError, match=r"^graph\.penalized: keeps a state that changes once a step"):
        plan_of("begins_low", *nodes)


def test_rounds_that_there_are_not() -> None:
    with pytest.raises(RecipeError, match=r"^expect\.rounds: no node 'dynamic_sampling' asks for more prompts"):
        rlflow.compile(load("recipe=fake", "expect.rounds=2", config_dir=CONFIG_DIR), "local")


def test_the_order_of_the_nodes_in_rounds() -> None:
    recipe = load("recipe=dapo_tiny")
    graph = wire(recipe)
    assert [node.name for node in resampled_nodes(graph)] == ["rollouts", "rewards", "sampling"]
