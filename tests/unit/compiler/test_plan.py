import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.compiler import compile_recipe
from rlflow.compiler.plan import plan_from, read_plan
from rlflow.errors import PlacementError, RecipeError
from rlflow.recipe.compose import load_cluster
from rlflow.recipe.load import recipe_from
from rlflow.resources.time.speed import Efficiency
from tests.conftest import CONFIG_DIR, LARGE, SETS_OF_RECIPES
from tests.helpers import load


@pytest.mark.parametrize("recipes", SETS_OF_RECIPES)
def test_a_plan_is_read_back_as_it_was_written(recipes: list[str]) -> None:
    for recipe in recipes:
        plan = rlflow.compile(load(f"recipe={recipe}"), LARGE.get(recipe, "1x8+1x7@h200"))
        assert plan_from(json.loads(json.dumps(plan.to_dict()))) == plan, recipe


def test_the_fingerprint_is_of_the_experiment_in_the_recipe_of_a_model_too() -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny"), "local")
    policy = plan.recipe.models["policy"]
    assert policy.recipe is not None
    actor = policy.recipe.roles["actor"]

    def fingerprint(**changes: Any) -> str:
        base = replace(policy.recipe, **changes)  # type: ignore[type-var]
        recipe = replace(plan.recipe, models={"policy": replace(policy, recipe=base)})
        return replace(plan, recipe=recipe).fingerprint

    assert fingerprint(roles={"actor": replace(actor, micro_batch_tokens=512)}) == plan.fingerprint
    assert fingerprint(seed=7) != plan.fingerprint


@pytest.mark.slow
def test_the_fingerprint_is_of_the_experiment() -> None:
    recipe = load("recipe=grpo_32b")
    assert rlflow.compile(recipe, "2x8").fingerprint == rlflow.compile(recipe, "4x8").fingerprint
    pinned = load("recipe=grpo_32b", "roles.actor.micro_batch_tokens=8192", "checkpoints.keep=9")
    assert rlflow.compile(recipe, "2x8").fingerprint == rlflow.compile(pinned, "2x8").fingerprint
    other = load("recipe=grpo_32b", "graph.rollouts.group_size=4")
    assert rlflow.compile(recipe, "2x8").fingerprint != rlflow.compile(other, "2x8").fingerprint


@pytest.mark.slow
def test_equal_input_gives_equal_bytes() -> None:
    texts = {
        json.dumps(rlflow.compile(load("recipe=fake", *order, config_dir=CONFIG_DIR), "2x8").to_dict(), sort_keys=True)
        for order in (["seed=1", "steps=3"], ["steps=3", "seed=1"])
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_the_order_of_keys_and_the_hash_seed_mean_nothing() -> None:
    recipe = load("recipe=grpo_32b")
    mapping = json.loads(json.dumps(asdict(recipe)))
    for part in ("roles", "models", "graph"):
        mapping[part] = dict(reversed(mapping[part].items()))
    turned = rlflow.compile(recipe_from(dict(reversed(mapping.items()))), "2x8")
    expected = json.dumps(rlflow.compile(recipe, "2x8").to_dict(), sort_keys=True)
    assert json.dumps(turned.to_dict(), sort_keys=True) == expected
    program = "import json, rlflow; plan = rlflow.compile(rlflow.load(['recipe=grpo_32b']), '2x8')"
    program += "; print(json.dumps(plan.to_dict(), sort_keys=True))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "tokens"), [("1x8@a100_80gb", 16384), ("3x8@a100_80gb", 20480)])
def test_7b_fits_at_the_lengths_that_people_reach_by_hand(cluster: str, tokens: int) -> None:
    plan = rlflow.compile(load("recipe=grpo_7b", f"graph.rollouts.max_tokens={tokens}"), cluster)
    assert plan.prediction.headroom_gib is not None
    assert plan.prediction.headroom_gib > 0


@pytest.mark.slow
def test_measured_efficiencies_change_the_times() -> None:
    recipe, cluster = load("recipe=grpo_32b"), load_cluster("2x8")
    slow = compile_recipe(recipe, cluster, {"h100_80gb": Efficiency(matmul=0.4)})
    assert slow.prediction.step_seconds > 1.2 * compile_recipe(recipe, cluster).prediction.step_seconds


def test_what_plan_json_holds() -> None:
    plan = rlflow.compile(load("recipe=grpo_7b"), "1x8").to_dict()
    assert plan["step_seconds"] == max(node["start"] + node["seconds"] for node in plan["nodes"].values())
    assert plan["tokens_per_second_per_gpu"] > 0
    assert all(other["loses"] for other in plan["alternatives"])
    memory = plan["roles"]["actor"]["memory_gib"]
    assert set(memory["phases"]) == {"update", "resting", "sync"}
    assert {"weights", "optimizer", "activations", "context"} <= set(memory["phases"]["update"])
    assert set(memory["peak_gib"]["host-0"]) == set(range(8))


def _without(plan: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name != key}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan | {"schema_version": 0}, "schema_version is 0"),
        (lambda plan: _without(plan, "roles"), "is not a complete plan"),
        (lambda plan: _without(plan, "workload"), "is not a complete plan"),
        (lambda plan: plan | {"recipe": plan["recipe"] | {"seed": 7}}, "was changed after planning"),
        (lambda plan: plan | {"roles": _without(plan["roles"], "actor")}, "was changed after planning"),
        (lambda plan: plan | {"hosts": [plan["hosts"][0] | {"name": "other"}]}, "was changed after planning"),
    ],
)
def test_a_plan_that_is_not_whole(edit: Any, message: str) -> None:
    plan = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR)).to_dict()
    with pytest.raises(RecipeError, match=message):
        plan_from(edit(plan))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "not a plan")]
)
def test_a_file_that_is_no_plan(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=message):
        read_plan(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cluster", "override", "message"),
    [
        ("grpo_7b", "2x2@cpu", "actor.attention=flash_attention_2", "runs on GPUs only, and these hosts have CPUs"),
        ("grpo_7b", "2x2@cpu", "rollout.eager=false", "asks for CUDA graphs, and these hosts have CPUs"),
        ("grpo_7b", "1x8", "actor.eager=true", "does not apply to this role with engine 'deepspeed'"),
        ("grpo_7b", "1x8", "rollout.attention=sdpa", "does not apply to this role with engine 'vllm'"),
        ("grpo_tiny", "1x1@h200", "actor.attention=flash_attention_2", "has no kernel for a float32 model"),
    ],
)
def test_kernels_that_are_not_there(recipe: str, cluster: str, override: str, message: str) -> None:
    with pytest.raises(PlacementError, match=rf"roles\.{override.split('=')[0]}: .*{message}"):
        rlflow.compile(load(f"recipe={recipe}", f"roles.{override}"), cluster)


@pytest.mark.slow
def test_graphs_on_gpus_and_none_on_processors() -> None:
    def planned(cluster: str, eager: str) -> tuple[Any, Any, Any, float]:
        pinned = [f"roles.rollout.{pin}" for pin in (f"eager={eager}", "gpu_memory_utilization=0.6")]
        plan = rlflow.compile(load("recipe=grpo_7b", *pinned), cluster)
        memory = plan.to_dict()["roles"]["rollout"]["memory_gib"]["phases"]
        graphs = [memory.get(phase, {}).get("graphs", 0.0) for phase in ("generate", "resting")]
        return plan.roles["rollout"].layout.eager, graphs, memory, plan.prediction.nodes["rollouts"].seconds

    eager, graphs, memory, seconds = planned("1x8", "auto")
    assert (eager, graphs) == (False, pytest.approx([0.68, 0.68]))
    eager, graphs, without, slower = planned("1x8", "true")
    assert (eager, graphs) == (True, [0.0, 0.0])
    assert without["generate"]["kv"] == pytest.approx(memory["generate"]["kv"] + 0.68)
    assert slower >= seconds
    assert planned("2x2@cpu", "auto")[0] is True
