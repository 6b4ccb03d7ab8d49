"""Whole runs: what they write, that they repeat themselves, that they go on where they stopped."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.recipe import Optimizer
from rlflow.report.records import MetricsWriter, SampleLog, read_lines
from rlflow.runtime.checkpoint import RunProgress
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Observer, Report
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import Warnings, load, metrics_of
from tests.integration.reward_functions import sum_of_characters

pytestmark = pytest.mark.slow


class StopAfter(Observer):
    """Asks the run to stop when so many steps are behind it, in whichever process that is."""

    def __init__(self, step: int) -> None:
        self.wanted, self.reached = step, False

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.reached = step == self.wanted


def go(plan: Plan, folder: Path, *, resume: bool = False, until: int = 0) -> Report:
    stopper = StopAfter(until)
    return run(
        plan,
        folder,
        LocalRuntime(),
        [MetricsWriter(), SampleLog(), stopper],
        resume=resume,
        stop=lambda: stopper.reached,
    )


def plan_of(recipe: str, *overrides: str) -> Plan:
    return rlflow.compile(load(f"recipe={recipe}", *overrides, config_dir=CONFIG_DIR))


def weights(report: Report) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(report.models["actor"]).state_dict())


def test_a_run_writes_all_of_it(tmp_path: Path) -> None:
    report = go(plan_of("fake"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".lock", "plan.json", "metrics.jsonl", "checkpoints", "model", "report.json", "recipe.yaml"),
        "samples.jsonl",
    }
    assert json.loads((tmp_path / "report.json").read_text()) == asdict(report)
    assert (report.status, report.steps) == ("finished", 6)
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines if "evaluation/reward" in line] == [0, 2, 4, 6]
    assert [line["step"] for line in lines if "update/loss" in line] == [1, 2, 3, 4, 5, 6]
    samples = read_lines(tmp_path / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4, 5, 6}
    assert all(re.fullmatch(r"\d+\+\d+=", sample["prompt"]) for sample in samples)


def test_the_public_way(tmp_path: Path) -> None:
    assert rlflow.run(plan_of("fake"), tmp_path).status == "finished"


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    """The tests below compare runs of the same seed."""
    for seed in (0, 1):
        go(plan_of("fake", f"seed={seed}"), tmp_path / str(seed))
    assert metrics_of(tmp_path / "0") != metrics_of(tmp_path / "1")


def test_stopped_after_any_step_and_resumed(tmp_path: Path) -> None:
    plan = plan_of("real", "graph.update.num_minibatches=2", "steps=4")
    whole = go(plan, tmp_path / "whole")
    expected = weights(whole)
    for step in (1, 3):
        folder = tmp_path / str(step)
        assert go(plan, folder, until=step).status == "stopped"
        resumed = go(plan, folder, resume=True)
        assert (resumed.status, resumed.steps) == ("finished", 4)
        again = weights(resumed)
        for name, weight in expected.items():
            assert torch.equal(again[name], weight), (step, name)
        assert metrics_of(folder) == metrics_of(tmp_path / "whole")
        assert read_lines(folder / "samples.jsonl") == read_lines(tmp_path / "whole" / "samples.jsonl")
        assert (resumed.eval_before, resumed.eval_after) == (whole.eval_before, whole.eval_after)


# The measures after each evaluated step. The best of the first four is after step 2.
MEASURES = {0: 0.1, 2: 0.3, 4: 0.3, 6: 0.2, 8: 0.9, 10: 0.9}


def test_a_run_without_a_new_best_ends_early_also_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two evaluations after the best one are over with step 6 of 10."""
    evaluated = RunProgress.evaluated
    monkeypatch.setattr(RunProgress, "evaluated", lambda progress, _: evaluated(progress, MEASURES[progress.step]))
    plan = plan_of("real", "steps=10", "evaluation.patience=2")
    whole = go(plan, tmp_path / "whole")
    assert (whole.status, whole.steps, whole.eval_before, whole.eval_after) == ("finished", 6, 0.1, 0.2)
    expected = weights(whole)
    for step in (3, 5):
        folder = tmp_path / str(step)
        assert go(plan, folder, until=step).status == "stopped"
        resumed = go(plan, folder, resume=True)
        assert (resumed.status, resumed.steps, resumed.eval_after) == ("finished", 6, 0.2)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())
        assert metrics_of(folder) == metrics_of(tmp_path / "whole")
    assert go(plan, tmp_path / "3", resume=True).steps == 6, "it has ended"
    assert go(plan_of("real", "steps=10"), tmp_path / "3", resume=True).steps == 10, "without patience it goes on"


def test_a_run_is_not_resumed_with_other_rows(tmp_path: Path) -> None:
    """A step takes rows by their places, so that other rows would repeat some and leave out others."""
    rows = tmp_path / "rows.jsonl"
    plan = plan_of("fake", f"data.source={rows}", "data.eval_split=null", "evaluation=null")
    lines = [json.dumps({"prompt": str(number), "answer": "1"}) + "\n" for number in range(9)]
    rows.write_text("".join(lines[:6]))
    go(plan, tmp_path / "run", until=1)
    for changed in (lines, lines[:6][::-1], [*lines[:5], lines[5].replace('"1"', '"2"')]):
        rows.write_text("".join(changed))
        with pytest.raises(
            RecipeError, match=r"^resume: '.*' was trained on 6 rows with the digest \w+, and data.source"
        ):
            go(plan, tmp_path / "run", resume=True)
    rows.write_text("".join(lines[:6]))
    assert go(plan, tmp_path / "run", resume=True).status == "finished"


def test_a_checkpoint_behind_the_metrics(tmp_path: Path) -> None:
    """A run that died after step 5, its last checkpoint at step 4: what is done again stands there once."""
    plan = plan_of("fake")
    go(plan, tmp_path / "whole")
    go(plan, tmp_path / "dead", until=5)
    (tmp_path / "dead" / "checkpoints" / "step-000005").rename(tmp_path / "lost")
    go(plan, tmp_path / "dead", resume=True)
    assert metrics_of(tmp_path / "dead") == metrics_of(tmp_path / "whole")


def test_stopped_before_the_first_step_and_resumed(tmp_path: Path) -> None:
    plan = plan_of("fake")
    go(plan, tmp_path / "whole")
    stopped = run(plan, tmp_path / "run", LocalRuntime(), [MetricsWriter()], stop=lambda: True)
    assert (stopped.status, stopped.steps) == ("stopped", 0)
    go(plan, tmp_path / "run", resume=True)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_weights_that_are_not_finite_are_neither_copied_nor_saved_nor_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler never gets them, and the last good checkpoint stays the last."""
    recipe = load("recipe=real", "steps=2", config_dir=CONFIG_DIR)
    go(rlflow.compile(recipe, "local"), tmp_path, until=1)
    engines: list[TransformersEngine] = []
    init = TransformersEngine.__init__

    def noting(engine: TransformersEngine, spec: EngineSpec) -> None:
        init(engine, spec)
        engines.append(engine)

    monkeypatch.setattr(TransformersEngine, "__init__", noting)
    # No recipe may have such a learning rate.
    actor = replace(recipe.roles["actor"], optimizer=Optimizer(learning_rate=1e39))
    plan = rlflow.compile(replace(recipe, roles={**recipe.roles, "actor": actor}), "local")
    with pytest.raises(EngineError, match=r"^step 2: role actor: model\.embed_tokens\.weight and .* not finite"):
        go(plan, tmp_path, resume=True)
    assert engines
    for engine in engines:
        assert all(weight.isfinite().all() for weight in engine._model.state_dict().values())
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert not (tmp_path / "model").exists()


def test_half_a_line_of_metrics_is_dropped(tmp_path: Path) -> None:
    plan = plan_of("fake")
    go(plan, tmp_path / "whole")
    go(plan, tmp_path / "run", until=3)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "upd')
    go(plan, tmp_path / "run", resume=True)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_a_folder_that_holds_a_run_is_not_used_again(tmp_path: Path) -> None:
    go(plan_of("fake"), tmp_path)
    before = metrics_of(tmp_path)
    with pytest.raises(RecipeError, match=r"resume: '.*' holds a run already"):
        go(plan_of("fake"), tmp_path)
    assert metrics_of(tmp_path) == before


def test_prompts_that_are_too_long_are_counted_where_a_person_sees_it(tmp_path: Path) -> None:
    """All prompts have six tokens, such as 12+34=, which is one too many."""
    plan, seen = plan_of("fake", "data.max_prompt_tokens=5", "data.overlong=truncate_left", "steps=1"), Warnings()
    report = run(plan, tmp_path, LocalRuntime(), [seen])
    train, held_out = seen.texts
    said = "prompts of '{}' are longer than 5 tokens; only their last 5 tokens are used"
    assert re.fullmatch(rf"data\.overlong: (\d+) of \1 {said.format('train')}", train)
    assert held_out == f"data.overlong: 10 of 10 {said.format('test')}"
    assert json.loads((tmp_path / "report.json").read_text())["warnings"] == report.warnings == [train, held_out]


def test_evaluation_takes_the_likeliest_tokens_of_held_out_prompts(tmp_path: Path) -> None:
    plan = plan_of("real", "steps=1")
    report = go(plan, tmp_path)
    models = models_in_use(plan.recipe)
    tokenizer = load_tokenizer("policy", models["policy"])
    rows = load_rows(plan.recipe.data, "eval_split")[:10]
    prompts = open_training_data(
        plan.recipe.data, tokenizer, (), 0, held_out={"": (plan.recipe.data, rows)}
    ).held_out_prompts()
    with LocalRuntime().start(plan, models, tmp_path) as engines:
        engines["rollout"].load_weights(engines["actor"].weights(), 0)
        greedy = engines["rollout"].generate(prompts, Sampling(max_tokens=4, temperature=0.0))
    assert report.eval_before == pytest.approx(sum(sum_of_characters(greedy.texts, greedy.rows)) / 10)
    assert report.eval_before != report.eval_after


@pytest.fixture
def top_plan(tmp_path: Path) -> Plan:
    """Return the plan of a recipe that starts from the model of another one."""
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    base = (CONFIG_DIR / "recipe" / "real.yaml").read_text()
    start, end = base.index("  policy:"), base.index("roles:")
    top = base[:start] + "  policy: {recipe: real, dtype: float32}\n" + base[end:]
    (tmp_path / "conf" / "recipe" / "real.yaml").write_text(base)
    (tmp_path / "conf" / "recipe" / "top.yaml").write_text(top.replace("name: real", "name: top"))
    return rlflow.compile(load("recipe=top", config_dir=tmp_path / "conf"))


def test_stopped_in_the_run_of_the_base_and_resumed(top_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(top_plan, tmp_path / "run", until=3)
    assert (tmp_path / "run" / "plan.json").exists()
    resumed = go(top_plan, tmp_path / "run", resume=True)
    assert resumed.status == "finished"
    assert [line["step"] for line in metrics_of(tmp_path / "run" / "base" / "policy") if "update/loss" in line] == [
        *range(1, 7)
    ]


def test_the_model_loads_and_the_base_is_made_once(top_plan: Plan, tmp_path: Path, cache: Path) -> None:
    plan = top_plan
    first = go(plan, tmp_path / "first")
    assert (tmp_path / "first" / "base" / "policy" / "report.json").exists()
    assert [path.name.split("-")[0] for path in cache.iterdir()] == ["real"]
    second = go(plan, tmp_path / "second")
    assert not (tmp_path / "second" / "base").exists()
    expected = weights(first)
    assert all(torch.equal(expected[name], weight) for name, weight in weights(second).items())


def test_a_reward_that_raises_names_its_place(tmp_path: Path) -> None:
    plan = plan_of("fake", f"graph.rewards.function='{__name__}:raising'", "evaluation=null")
    with pytest.raises(RecipeError, match=r"^graph\.rewards\.function: '.*:raising' failed \(ValueError: no\)"):
        go(plan, tmp_path)
    assert not (tmp_path / "report.json").exists()


def raising(texts: Any, rows: Any) -> list[float]:
    raise ValueError("no")


@pytest.mark.processes
def test_a_reward_that_cannot_run_here_is_told_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("made_here")
    module.reward = raising  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    with pytest.raises(EngineError, match=r"^reward 'made_here:reward' cannot be loaded in the fork server"):
        go(plan_of("fake", "graph.rewards.function='made_here:reward'"), tmp_path)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("name", ["of_even_length", "nan_for_odd_lengths"])
def test_responses_without_a_reward_are_left_out(name: str, tmp_path: Path) -> None:
    function = f"tests.integration.reward_functions:{name}"
    parts = f"even: {{function: '{function}', on_failure: exclude}}, exact: {{weight: 0.5}}"
    plan = plan_of("fake", "graph.rewards.function=null", f"graph.rewards.functions={{{parts}}}", "data.batch_size=20")
    go(plan, tmp_path)
    for line in metrics_of(tmp_path):
        if "rewards/mean" in line:
            assert 0 < line["rewards/failed"] < 1
            assert line["rewards/even/mean"] == 1
            assert line["rewards/mean"] == pytest.approx(1 + 0.5 * line["rewards/exact/mean"], abs=0.05)


def test_an_engine_that_fails_names_step_and_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlflow.engines.fake import FakeEngine

    def fail(*_: Any) -> None:
        raise MemoryError("too much")

    monkeypatch.setattr(FakeEngine, "update", fail)
    with pytest.raises(EngineError, match=r"step 1: node update, role actor: MemoryError: too much"):
        go(plan_of("fake"), tmp_path)
