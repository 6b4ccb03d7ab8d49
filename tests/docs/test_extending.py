"""docs/extending.md is true: its files work, its diffs are those of the files, and an algorithm is short."""

import importlib
import json
import re
from difflib import unified_diff
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Logprobs, Repeated, Rewards, RolloutAdvantages
from rlflow.compiler.wire import wire
from rlflow.engines.torch import TorchEngine
from rlflow.errors import GraphError
from rlflow.nodes.advantages import LeaveOneOutAdvantage
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.report.formula import loss_lines
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR, ROOT
from tests.helpers import load, pairs, rollouts, sequences, spec

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES, DIFFS = (re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) for language in ("python", "diff"))
GIVEN = rollouts(sequences([2, 3, 4], [[4, 1, 3], [2, 2], [5, 1, 1, 1]]))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the files of the page as modules."""
    monkeypatch.syspath_prepend(tmp_path)
    for number, text in enumerate(FILES):
        (tmp_path / f"extension_{number}.py").write_text(text)
    return [importlib.import_module(f"extension_{number}") for number in range(len(FILES))]


@pytest.mark.parametrize("diff", DIFFS)
def test_diffs_are_those_of_the_files(diff: str) -> None:
    one, other = (line.split()[1] for line in diff.splitlines()[:2])
    before, after = ((ROOT / name).read_text().splitlines(keepends=True) for name in (one, other))
    assert diff == "".join(unified_diff(before, after, one, other))


def test_an_algorithm_is_at_most_forty_lines() -> None:
    dr_grpo, rloo = ([line for line in diff.splitlines()[2:] if line[0] in "+-"] for diff in DIFFS)
    assert len(dr_grpo) <= 40
    assert len(FILES[0].splitlines()) + len(rloo) <= 40


def test_the_node_is_rloos(written: Any) -> None:
    rewards = Rewards(values=np.random.default_rng(0).normal(size=len(GIVEN)).astype(np.float32))
    ours, theirs = (
        node.run(GIVEN, rewards).values.run_values for node in (written[0].LeaveOneOut(), LeaveOneOutAdvantage())
    )
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_the_loss_trains(written: Any) -> None:
    advantages = RolloutAdvantages(values=Repeated(np.ones(len(GIVEN), np.float32), GIVEN.response_ids.lengths))
    engine, before = TorchEngine(spec()), TorchEngine(spec()).logprobs(GIVEN, 1.0).values.values
    metrics = written[1].SoftlyClipped().run(engine, GIVEN, advantages).values
    assert metrics["grad_norm"] > 0
    assert metrics["off_policy"] > 0
    assert engine.logprobs(GIVEN, 1.0).values.values.mean() > before.mean()


def test_the_preference_loss_is_ipos(written: Any) -> None:
    """Against a plain loop, and it trains within DPO's node."""
    node, given = written[2].IpoUpdate(beta=0.2), pairs(7)
    engine = TorchEngine(spec())
    own = engine.logprobs(given, 1.0).values
    reference = own.like(own.values + np.random.default_rng(0).normal(0, 0.1, len(own.values)).astype(np.float32))
    expected = 0.0
    for pair in range(7):
        chosen, rejected = (float((own[row] - reference[row]).sum()) for row in (2 * pair, 2 * pair + 1))
        expected += (chosen - rejected - 1 / (2 * 0.2)) ** 2 / 7
    metrics = node.run(engine, given, Logprobs(values=reference)).values
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["grad_norm"] > 0
    graph = wire(load("recipe=dpo_tiny", "graph.update.node='extension_2:IpoUpdate'"))
    assert graph.evaluation_metric == "accuracy"
    assert loss_lines(graph)[0].endswith("pairs of [IpoLoss(m)]")


def test_an_input_of_each_token_without_a_copied_run(written: Any) -> None:
    """The input is wired by name, excluded rows are removed from it, and it scales the loss."""
    distill = ["recipe=distill_tiny", "graph.update.node='extension_3:WeighedByTeacher'", "graph.update.reference=null"]
    (update,) = (node for node in wire(load(*distill)).nodes if node.name == "update")
    assert update.inputs == {"teacher": "teacher", "rollouts": "rollouts", "advantages": "advantages"}
    values = np.array([1, np.nan, 2, -1, 1, 3, -2, 1, 1], np.float32)
    advantages = RolloutAdvantages(values=Repeated(values, GIVEN.response_ids.lengths))
    teacher = Logprobs(values=GIVEN.logprobs.like(np.full(len(GIVEN.logprobs.values), np.log(0.25), np.float32)))
    node = written[3].WeighedByTeacher()
    ours = node.run(engine=TorchEngine(spec()), rollouts=GIVEN, advantages=advantages, teacher=teacher).values
    plain = PolicyUpdate().run(TorchEngine(spec()), GIVEN, advantages).values
    assert ours["loss"] == pytest.approx(plain["loss"] / 4, rel=1e-5)


@pytest.mark.slow
def test_a_state_a_group_comparison_and_metrics_in_one_file(written: Any, tmp_path: Path) -> None:
    """The run is stopped after a step and resumed, and its state goes on from the checkpoint."""
    assert len(FILES[4].splitlines()) <= 40
    overrides = ["recipe=real", "steps=2", "graph.advantages.node='extension_4:RunningScale'", "evaluation=null"]
    plan = rlflow.compile(load(*overrides, config_dir=CONFIG_DIR))
    answers = iter([False, True])
    run(plan, tmp_path / "run", LocalRuntime(), [MetricsWriter()], stop=lambda: next(answers))
    saved = tmp_path / "run" / "checkpoints" / "step-000001" / "graph.advantages" / "deviation.json"
    deviation = json.loads(saved.read_text())
    assert deviation != 1.0
    run(plan, tmp_path / "run", LocalRuntime(), [MetricsWriter()], resume=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["advantages/deviation"], second["advantages/deviation"]) == (1.0, deviation)
    assert 0 <= first["advantages/differing"] <= 1


def test_a_group_of_one_is_refused(written: Any) -> None:
    overrides = ["recipe=real", "graph.advantages.node='extension_4:RunningScale'", "graph.rollouts.group_size=1"]
    message = r"^graph\.advantages: compares the responses to a prompt, but group_size is 1\."
    with pytest.raises(GraphError, match=message):
        rlflow.compile(load(*overrides, config_dir=CONFIG_DIR))
