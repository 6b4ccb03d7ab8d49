"""Runs whose values are not finite: which steps they skip, what such a step leaves as it was, and when they end."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlflow
from rlflow.batch import Logprobs, Repeated, Rewards, RolloutAdvantages, Rollouts
from rlflow.cli import run_subcommand
from rlflow.commands import replay
from rlflow.compiler.plan import Plan
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Observer, Report
from rlflow.runtime.run import run
from rlflow.runtime.skipped_steps import read_skipped, skipped_folders
from tests.conftest import CONFIG_DIR
from tests.helpers import load
from tests.integration.test_overlap import Threads

pytestmark = pytest.mark.slow

State = Mapping[str, torch.Tensor]


class Watch(Observer):
    """Knows the number of the step that is being made, and copies all state of both engines after each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int = 0) -> None:
        self.step, self.until = 1, until
        self.engines: dict[str, Any] = {}
        self.after: dict[int, State] = {}
        self.warnings: list[str] = []
        for kind in (TorchEngine, TransformersEngine):
            monkeypatch.setattr(kind, "__init__", self.noting(kind.__init__))

    def noting(self, init: Callable[..., None]) -> Callable[..., None]:
        def wrapped(engine: Any, spec: Any) -> None:
            init(engine, spec)
            self.engines[spec.role] = engine

        return wrapped

    def warned(self, warning: str) -> None:
        self.warnings.append(warning)

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self.step = step + 1

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step + 1
        state = {f"{role}.{k}": v for role, each in self.engines.items() for k, v in each._model.state_dict().items()}
        moments = self.engines["actor"]._optimizer.state_dict()["state"]
        state |= {f"{number}.{k}": v for number, each in moments.items() for k, v in each.items()}
        self.after[step] = {name: value.clone() for name, value in state.items()}

    @property
    def is_over(self) -> bool:
        return bool(self.until) and self.step == self.until + 1


def go(plan: Plan, folder: Path, watch: Watch, *, resume: bool = False) -> Report:
    return run(plan, folder, LocalRuntime(), [watch, MetricsWriter()], resume=resume, stop=lambda: watch.is_over)


def plan_of(*overrides: str) -> Plan:
    return rlflow.compile(load("recipe=real", *overrides, config_dir=CONFIG_DIR))


def lines(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in found if "seconds" in line}


def break_losses(monkeypatch: pytest.MonkeyPatch, watch: Watch, steps: Collection[int]) -> None:
    """Make the loss of one token NaN in these steps."""
    surrogate = PolicyUpdate.surrogate

    def broken(node: PolicyUpdate, logprobs: torch.Tensor, columns: Any) -> Any:
        losses, metrics = surrogate(node, logprobs, columns)
        first = torch.arange(len(losses)) == 0
        return (losses.where(~first, losses * float("nan")) if watch.step in steps else losses), metrics

    monkeypatch.setattr(PolicyUpdate, "surrogate", broken)


def trained(state: State) -> State:
    """Return the state without that of the engine that generates, which may still load older weights."""
    return {name: value for name, value in state.items() if not name.startswith("rollout.")}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LINEAR = "roles.actor.optimizer={learning_rate: 1.0e-2, schedule: linear, warmup_steps: 0}"


def test_a_step_without_a_finite_loss_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    break_losses(monkeypatch, watch, {3})
    report = go(plan_of(LINEAR), tmp_path, watch)
    assert (report.status, report.steps) == ("finished", 6)
    assert report.warnings == ["1 of 6 steps were skipped for values that are not finite: 3"]
    assert same(watch.after[2], watch.after[3])
    assert {name.partition(".")[0] for name in watch.after[3]} >= {"actor", "rollout", "reference", "0"}
    assert not same(watch.after[3], watch.after[4])
    found = lines(tmp_path)
    assert {step: line["skipped_at/update"] for step, line in found.items() if "skipped_at/update" in line} == {3: 1.0}
    assert not any(key.startswith("seconds/") and key != "seconds/copy" for key in found[3])
    # Linear from 1e-2 to 0 in 6 steps: the steps after the third are one behind.
    rates = {step: line["update/learning_rate"] for step, line in found.items() if "update/learning_rate" in line}
    assert rates == pytest.approx({1: 1e-2, 2: 1e-2 * 5 / 6, 4: 1e-2 * 4 / 6, 5: 1e-2 * 3 / 6, 6: 1e-2 * 2 / 6})
    (warning,) = (each for each in watch.warnings if "skipped" in each)
    assert re.match(r"step 3 is skipped: node update: role actor: the loss is nan at 1 of .* \(step 2 prompt", warning)


def test_the_batch_of_a_skipped_step_is_saved_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    break_losses(monkeypatch, watch, {2})
    plan = plan_of()
    go(plan, tmp_path, watch)
    (folder,) = skipped_folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        *("reason.json", "rollouts.npz", "advantages.npz", "reference.npz")
    }
    for file in folder.glob("*.npz"):
        with np.load(file, allow_pickle=False) as arrays:
            assert all(array.dtype != object for array in arrays.values())
    saved = read_skipped(folder, plan.graph)
    assert (saved.step, saved.node) == (2, "update")
    rollouts: Any = saved.edges["rollouts"]
    assert rollouts.keys.tolist() == [[1, prompt, sample] for prompt in range(3) for sample in range(4)]
    assert len(rollouts.texts) == 12
    reference: Any = saved.edges["reference"]
    assert np.isfinite(reference.values.values).all()


def break_advantages(monkeypatch: pytest.MonkeyPatch, watch: Watch, steps: Collection[int]) -> None:
    original = GroupAdvantage.run

    def broken(self: GroupAdvantage, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        output = original(self, rollouts, rewards)
        values = output.values.run_values.copy()
        if watch.step in steps:
            values[0] = np.nan
        return RolloutAdvantages(values=Repeated(values, output.values.run_lengths))

    monkeypatch.setattr(GroupAdvantage, "run", broken)


def break_rollouts(monkeypatch: pytest.MonkeyPatch, watch: Watch, steps: Collection[int]) -> None:
    original = TransformersEngine.generate

    def broken(engine: TransformersEngine, prompts: Any, sampling: Any) -> Rollouts:
        output = original(engine, prompts, sampling)
        values = output.logprobs.values.copy()
        if watch.step in steps:
            values[-1] = np.nan
        return replace(output, logprobs=output.logprobs.like(values))

    monkeypatch.setattr(TransformersEngine, "generate", broken)


def break_reference(monkeypatch: pytest.MonkeyPatch, watch: Watch, steps: Collection[int]) -> None:
    original = TransformersEngine.logprobs

    def broken(engine: TransformersEngine, sequences: Any, temperature: float) -> Logprobs:
        output = original(engine, sequences, temperature)
        values = output.values.values.copy()
        if watch.step in steps:
            values[-1] = -np.inf
        return replace(output, values=output.values.like(values))

    monkeypatch.setattr(TransformersEngine, "logprobs", broken)


@pytest.mark.parametrize(
    ("breaks", "node", "message"),
    [
        (break_advantages, "advantages", r"node advantages: the advantage is not finite for 1 of 12 samples"),
        (
            break_reference,
            "reference",
            r"node reference: 1 logprobs of 1 of 12 samples are not finite \(step 1 prompt 2 sample 3; first at token",
        ),
    ],
)
def test_the_output_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Any, node: str, message: str
) -> None:
    watch = Watch(monkeypatch)
    breaks(monkeypatch, watch, {2})
    go(plan_of("steps=3", "graph.update.kl_coef=0.1"), tmp_path, watch)
    assert [step for step, line in lines(tmp_path).items() if f"skipped_at/{node}" in line] == [2]
    assert same(watch.after[1], watch.after[2])
    assert not same(watch.after[2], watch.after[3])
    assert any(re.search(message, each) for each in watch.warnings)


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 2, 4 and 5 are not in a row with 6, and two in a row are allowed."""
    watch = Watch(monkeypatch)
    break_losses(monkeypatch, watch, {2, 4, 5, 7, 8, 9})
    message = (
        r"^step 9: node update: role actor: the loss is nan at 1 of \d+ tokens of a pass \(step 8 prompt \d sample \d; "
        r"first at token 0\)\. The run ends because the last 3 steps were skipped \(stop_after_skipped_steps\)\.\n"
        r"  Fix: 'rlflow replay "
    )
    with pytest.raises(EngineError, match=message):
        go(plan_of("steps=12"), tmp_path, watch)
    assert [step for step, line in lines(tmp_path).items() if "skipped_at/update" in line] == [2, 4, 5, 7, 8]
    assert [each.name for each in skipped_folders(tmp_path)] == [f"step-00000{step}" for step in (4, 5, 7, 8, 9)]


def test_the_number_in_a_row_is_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    break_losses(monkeypatch, watch, {1})
    with pytest.raises(EngineError, match=r"The run ends because the step was skipped"):
        go(plan_of("stop_after_skipped_steps=1"), tmp_path, watch)


def test_a_resumed_run_remembers_its_skipped_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped step does not advance the learning rate, and a row of skipped steps continues over a checkpoint."""
    whole = Watch(monkeypatch)
    break_losses(monkeypatch, whole, {2})
    expected = go(plan_of(LINEAR), tmp_path / "whole", whole)
    for until in (2, 3):
        folder = tmp_path / str(until)
        for resume in (False, True):
            watch = Watch(monkeypatch, until=0 if resume else until)
            break_losses(monkeypatch, watch, {2})
            report = go(plan_of(LINEAR), folder, watch, resume=resume)
        assert same(watch.after[6], whole.after[6])
        assert report.warnings == expected.warnings
    folder = tmp_path / "row"
    for resume in (False, True):
        watch = Watch(monkeypatch, until=0 if resume else 5)
        break_losses(monkeypatch, watch, {4, 5, 6})
        if resume:
            with pytest.raises(EngineError, match=r"step 6: .* the last 3 steps were skipped"):
                go(plan_of(), folder, watch, resume=resume)
        else:
            go(plan_of(), folder, watch)


def test_replay_shows_the_values_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 is skipped because of the rollouts, step 4 because of the reference, and step 5 because of the loss."""
    watch = Watch(monkeypatch)
    break_rollouts(monkeypatch, watch, {2})
    break_reference(monkeypatch, watch, {4})
    break_losses(monkeypatch, watch, {5})
    go(plan_of("steps=5", "graph.update.kl_coef=0.1", "checkpoints.keep=3", "evaluation=null"), tmp_path, watch)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    saved: Any = np.load(skipped_folders(tmp_path)[1] / "rollouts.npz")
    token = saved["logprobs.lengths"][-1] - 1
    bad = rf"  reference: step 3 prompt 2 sample 3, token {token}: -inf"
    for step, again in ((4, bad), (1, "  reference: all values are finite")):
        watch.step = step
        assert replay.main([str(tmp_path), "--step", "4"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("step 4 was skipped: node reference: 1 logprobs of 1 of 12 samples are not finite")
        assert lines[1:3] == ["saved values that are not finite:", bad]
        assert lines[3:5] == ["run again with the checkpoint of step 4:", again]
    assert lines[5] == "  update: all values are finite"
    assert replay.main([str(tmp_path), "--step", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("  rollouts: step 1 prompt 2 sample 3, token ")
    assert lines[4] == "  advantages: not run, because the step had no rewards yet"
    watch.step = 5
    assert replay.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["saved values that are not finite:", "  none", "run again with the checkpoint of step 5:"]
    assert re.match(
        r"  node update: role actor: the loss is nan at 1 of \d+ tokens of a pass \(step 4 prompt", lines[4]
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    assert run_subcommand("replay", [str(tmp_path), "--step", "1"]) == 2
    known = "  Known: 2, 4, 5.\n  Fix: use one of these steps.\n"
    assert capsys.readouterr().err.endswith(f"is not saved in '{tmp_path}'.\n{known}")


def test_a_reward_function_that_returns_nan_is_a_mistake_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends here, which is stricter than to skip the step."""
    plan = plan_of("graph.rewards.function='tests.integration.reward_functions:not_a_number'", "evaluation=null")
    with pytest.raises(RecipeError, match=r"graph\.rewards\.function: .* returned nan for the response"):
        go(plan, tmp_path, Watch(monkeypatch))


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_step_that_was_generated_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """A thread computes the advantages ahead too, and the step that reads them is skipped."""
    bad_step = 3
    original = GroupAdvantage.run

    def broken(self: GroupAdvantage, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        output = original(self, rollouts, rewards)
        values = output.values.run_values.copy()
        values[rollouts.keys[:, 0] == bad_step - 1] = np.inf
        return RolloutAdvantages(values=Repeated(values, output.values.run_lengths))

    monkeypatch.setattr(GroupAdvantage, "run", broken)
    watch = Watch(monkeypatch)
    overlap = "overlap={max_staleness: 1}"
    apart = ["roles.rollout.colocate=[]"] if gpus > 1 else []
    plan = rlflow.compile(load("recipe=real", overlap, *apart, config_dir=CONFIG_DIR), f"1x{gpus}@cpu")
    report = run(plan, tmp_path, Threads(), [watch, MetricsWriter()])
    skipped = [step for step, line in lines(tmp_path).items() if "skipped_at/advantages" in line]
    # Steps whose samples are judged in one call are skipped together.
    assert bad_step in skipped
    assert set(skipped) <= {bad_step - 1, bad_step, bad_step + 1}
    assert report.status == "finished"
    for step in skipped:
        assert same(trained(watch.after[step - 1]), trained(watch.after[step]))
    assert not same(watch.after[5], watch.after[6])
