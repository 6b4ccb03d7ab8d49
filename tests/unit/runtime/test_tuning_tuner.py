"""The tuner of a run, with stubs for engines: whom it tunes, what it writes, what a person sees."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.engines.registry import engine_kind
from rlflow.report.records import tuning_table
from rlflow.runtime.engine_specs import num_sequences
from rlflow.runtime.tuning import Tuner, with_spare_slots
from tests.helpers import load
from tests.unit.runtime.ray.test_role_proxy import Threads, proxy


class Stub:
    """Does a thousand tokens in a second for every thousand tokens of a micro-batch, up to 4000."""

    def __init__(self, tokens: int = 2048) -> None:
        self.tokens = tokens

    def set_micro_batch_tokens(self, tokens: int) -> None:
        self.tokens = tokens

    def memory_share(self) -> float:
        return self.tokens / 20_000

    def seconds(self, tokens: float) -> float:
        return tokens / min(4000, self.tokens)


def plan_of(*overrides: str) -> Plan:
    return rlflow.compile(load("recipe=grpo_tiny", *overrides))


def tuned(plan: Plan, folder: Path, engines: dict[str, Any], steps: int = 20) -> dict[str, Any]:
    tuner = Tuner(engines, adaptive=False)
    tuner.started(plan, folder, 0)
    for step in range(steps):
        seconds = {"update": engines["actor"].seconds(8000), "reference": engines["reference"].seconds(8000)}
        if isinstance(engines["rollout"], Writer):
            seconds["rollouts"] = engines["rollout"].seconds(8000)
        seconds |= {node.name: 1.0 for node in plan.graph.nodes if node.name not in seconds}
        tuner.stepped(step + 1, {"tokens": 8000, **{f"seconds/{name}": value for name, value in seconds.items()}})
    tuner.close()
    content: dict[str, Any] = json.loads((folder / "tuning.json").read_text())
    return content


def stubs() -> dict[str, Any]:
    return {role: Stub() for role in ("actor", "reference", "rollout")}


def test_roles_that_pass_sequences_through_a_model_are_tuned(tmp_path: Path) -> None:
    engines = stubs()
    found = tuned(plan_of(), tmp_path, engines)
    assert set(found) == {"actor", "reference"}
    assert engines["rollout"].tokens == 2048
    assert engines["actor"].tokens == found["actor"]["best"] == 4608
    trials = found["actor"]["trials"]
    assert [trial["setting"] for trial in trials] == [2048, 3072, 4608, 6656]  # a minibatch
    assert [round(trial["tokens_per_second"]) for trial in trials] == [2048, 3072, 4000, 4000]
    assert trials[1]["memory_share"] == pytest.approx(0.1536)
    assert found["actor"]["planned"] == 2048
    assert not found["actor"]["trying"]
    assert found["actor"]["predicted"]["tokens_per_second"] > 0


class Writer:
    """Writes as fast as it has places, up to 500."""

    def __init__(self) -> None:
        self.places = 0

    def set_max_num_seqs(self, number: int) -> None:
        self.places = number

    def seconds(self, tokens: float) -> float:
        return tokens / min(500, self.places)


def test_concurrent_engines_are_tuned_by_their_number_of_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny", "roles.rollout.engine=vllm"))
    monkeypatch.setattr(engine_kind("vllm").engine, "set_max_num_seqs", Writer.set_max_num_seqs, raising=False)
    # They are started with room for more than is planned.
    assert (num_sequences(plan, "rollout"), num_sequences(with_spare_slots(plan), "rollout")) == (256, 512)
    few = rlflow.compile(load("recipe=grpo_tiny", "roles.rollout.engine=vllm", "data.batch_size=40"))
    assert num_sequences(with_spare_slots(few), "rollout") == 320  # of 40 prompts 8
    engines = {**stubs(), "rollout": Writer()}
    found = tuned(plan, tmp_path, engines)["rollout"]
    assert [trial["setting"] for trial in found["trials"]] == [256, 384, 512]
    assert found["setting"] == "max_num_seqs"
    assert engines["rollout"].places == found["best"] == 512


def test_pinned_settings_are_not_tuned(tmp_path: Path) -> None:
    engines = stubs()
    assert set(tuned(plan_of("roles.actor.micro_batch_tokens=2048"), tmp_path, engines)) == {"reference"}
    assert engines["actor"].tokens == 2048


def test_the_table_has_measured_and_predicted_values(tmp_path: Path) -> None:
    tuned(plan_of(), tmp_path, stubs())
    table = tuning_table(tmp_path)
    console = Console(width=100, file=io.StringIO(), highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines() if "(kept)" in line]
    assert lines[0][:3] == ["4608", "(kept)", "4000"]
    assert lines[0][-1] == "+95%"


def test_with_dynamic_sampling_a_trainer_is_measured_by_what_it_trains_on(tmp_path: Path) -> None:
    """A step without anything to train on does not count."""
    plan = rlflow.compile(load("recipe=dapo_tiny"))
    tuner = Tuner({"actor": Stub(), "rollout": Stub()}, adaptive=False)
    tuner.started(plan, tmp_path, 0)
    for step in range(6):
        found = {"sampling/tokens": 1000.0, "seconds/update": 0.5} if step % 2 else {"sampling/tokens": 0.0}
        tuner.stepped(step + 1, {"tokens": 8000.0 * step, "seconds/rollouts": 1.0, **found})
    content = json.loads((tmp_path / "tuning.json").read_text())["actor"]
    assert [trial["tokens_per_second"] for trial in content["trials"]] == [2000]
    planned = content["predicted"]["tokens_per_second"]
    twice = rlflow.compile(load("recipe=dapo_tiny", "expect.rounds=2"))
    tuner.started(twice, tmp_path, 0)
    predicted = json.loads((tmp_path / "tuning.json").read_text())["actor"]["predicted"]
    assert predicted["tokens_per_second"] == pytest.approx(planned)


def test_the_report_says_why_nothing_was_tuned(tmp_path: Path) -> None:
    tuned(plan_of(), tmp_path, stubs(), steps=1)
    assert tuning_table(tmp_path) == "nothing was tuned: the first trial takes three steps"
    pinned = plan_of("roles.actor.micro_batch_tokens=2048", "roles.reference.micro_batch_tokens=2048")
    tuned(pinned, tmp_path, stubs())
    assert str(tuning_table(tmp_path)).startswith("nothing to tune: every micro_batch_tokens is pinned")


def test_a_planned_size_that_did_nothing_has_no_gain_over_it(tmp_path: Path) -> None:
    tuned(plan_of(), tmp_path, stubs())
    found = json.loads((tmp_path / "tuning.json").read_text())
    found["actor"]["trials"][0]["tokens_per_second"] = 0.0
    (tmp_path / "tuning.json").write_text(json.dumps(found))
    assert not isinstance(tuning_table(tmp_path), str)


def test_what_has_settled_is_left_alone(tmp_path: Path) -> None:
    class Counting(Stub):
        asked = 0

        def memory_share(self) -> float:
            self.asked += 1
            return super().memory_share()

    engines = {**stubs(), "actor": Counting()}
    tuned(plan_of(), tmp_path, engines, steps=10)
    asked, written = engines["actor"].asked, (tmp_path / "tuning.json").stat()
    assert asked == 10  # before the first step, to warm up, and two of each of four
    engines = {**stubs(), "actor": Counting()}
    tuned(plan_of(), tmp_path, engines, steps=30)
    assert engines["actor"].asked == asked
    assert written.st_size == (tmp_path / "tuning.json").stat().st_size


def test_the_fullest_worker_counts_and_all_get_the_setting() -> None:
    workers = Threads([Stub(1000), Stub(3000)])
    role = proxy(workers)
    assert role.memory_share() == 0.15
    role.set_micro_batch_tokens(500)
    assert [engine.tokens for engine in workers.engines] == [500, 500]
