"""Whole runs of PPO: four roles, two of which are trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.torch import TorchEngine
from rlflow.recipe import Model
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Report, Runtime
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training
from tests.conftest import CONFIG_DIR
from tests.helpers import load, metrics_of, spec
from tests.integration.test_run import StopAfter
from tests.integration.test_run import go as here

pytestmark = pytest.mark.slow
HOSTS = "4x1@cpu"

SMALL = (
    *("steps=6", "data.batch_size=6", "evaluation={every: 2, num_prompts: 10}", "checkpoints.every=2"),
    *(f"roles.{role}.optimizer.warmup_steps=0" for role in ("actor", "critic")),
)
FAKE = tuple(f"roles.{role}.engine=fake" for role in ("actor", "critic", "reference", "rollout"))
SCHEDULE = tuple(
    f"roles.{role}.optimizer={{learning_rate: 1.0e-3, schedule: linear, warmup_steps: 1}}"
    for role in ("actor", "critic")
)
# So far from what is measured that it changes in every step.
ADAPTIVE = ("graph.advantages.kl_coef=0.1", "graph.advantages.kl_target=0.01")


def plan_of(*overrides: str, cluster: str = "local") -> Plan:
    """Return a plan with a model so small that it takes no time."""
    recipe = load("recipe=ppo_tiny", *SMALL, *overrides)
    return rlflow.compile(replace(recipe, models=load("recipe=real", config_dir=CONFIG_DIR).models), cluster)


def weights(report: Report) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kinds = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}
    return {
        f"{role}.{name}": weight
        for role, kind in kinds.items()
        for name, weight in kind.from_pretrained(report.models[role]).state_dict().items()
    }


def coefficient(folder: Path, step: int) -> float:
    saved = folder / "checkpoints" / f"step-{step:06d}" / "graph.advantages" / "kl_coef.json"
    return float(json.loads(saved.read_text()))


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.soak), ADAPTIVE])
def test_stopped_after_any_step_and_resumed(options: tuple[str, ...], tmp_path: Path) -> None:
    plan = plan_of("steps=4", *options)
    whole = here(plan, tmp_path / "whole")
    expected = weights(whole)
    assert {name.split(".")[0] for name in expected} == {"actor", "critic"}
    assert any(name.startswith("critic.score") for name in expected)
    for step in (1, 2, 3):
        folder = tmp_path / str(step)
        assert here(plan, folder, until=step).status == "stopped"
        resumed = here(plan, folder, resume=True)
        for name, weight in weights(resumed).items():
            assert torch.equal(weight, expected[name]), (step, name)
        assert metrics_of(folder) == metrics_of(tmp_path / "whole")
        if options:
            assert coefficient(folder, 4) == coefficient(tmp_path / "whole", 4) != 0.1


def test_the_policy_stays_while_the_critic_learns(tmp_path: Path) -> None:
    plan = plan_of("graph.update.critic_warmup=3", *SCHEDULE)
    models = models_in_use(plan.recipe)
    data = open_training_data(
        plan.recipe.data,
        load_tokenizer("policy", models["policy"]),
        load_rows(plan.recipe.data, "split"),
        plan.recipe.seed,
    )
    moved: dict[str, list[bool]] = {"actor": [], "critic": []}
    rates: dict[str, list[float]] = {"update": [], "value_update": []}
    with LocalRuntime().start(plan, models, tmp_path) as engines:
        engines["rollout"].load_weights(engines["actor"].weights(), 0)
        training = Training.of(plan, engines, data)
        for step in range(6):
            before = {role: {name: weight.clone() for name, weight in engines[role].weights()} for role in moved}
            told = train_step(training, step)
            for role, weights_of in before.items():
                after = dict(engines[role].weights())
                moved[role].append(any(not torch.equal(after[name], weight) for name, weight in weights_of.items()))
            for node, of_node in rates.items():
                of_node.append(told[f"{node}/learning_rate"] / 1e-3)
    assert moved == {"actor": [False] * 3 + [True] * 3, "critic": [True] * 6}
    # One step of warm-up, and then down to nothing at the end of the run, of which the policy has half.
    assert rates["update"] == pytest.approx([0, 0, 0, 1, 1, 1 / 2])
    assert rates["value_update"] == pytest.approx([1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_that_a_critic_has_a_new_head_is_no_news(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    TorchEngine(spec()).export(tmp_path)
    model = Model(path=str(tmp_path), dtype="float32")
    capfd.readouterr()
    TorchEngine(spec("critic", model=model, capabilities=["Values", "Trains"]))
    assert capfd.readouterr().err == ""


def on(runtime: Runtime, plan: Plan, folder: Path, *, until: int = 0, resume: bool = False) -> Report:
    stopper = StopAfter(until)
    return run(plan, folder, runtime, [MetricsWriter(), stopper], stop=lambda: stopper.reached, resume=resume)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hosts")
def test_four_roles_on_four_hosts_and_back(tmp_path: Path) -> None:
    """The coefficient is in the process that reads tokens, and in checkpoints."""
    pins = [f"roles.{role}.colocate=[]" for role in ("actor", "critic", "reference", "rollout")]
    apart = plan_of(*FAKE, *ADAPTIVE, *pins, cluster="4x1@cpu")
    assert len({bundle for placement in apart.roles.values() for bundle in placement.bundles}) == 4
    on(LocalRuntime(), plan_of(*FAKE, *ADAPTIVE), tmp_path / "local")
    assert on(RayRuntime(), apart, tmp_path / "ray", until=3).status == "stopped"
    report = on(RayRuntime(), apart, tmp_path / "ray", resume=True)
    assert set(report.models) == {"actor", "critic"}
    assert metrics_of(tmp_path / "ray") == metrics_of(tmp_path / "local")
    assert coefficient(tmp_path / "ray", 6) == coefficient(tmp_path / "local", 6) != 0.1
