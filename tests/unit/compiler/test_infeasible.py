"""Recipes that do not fit: the pins that are named, the memory that is missing, and fixes that work."""

import pytest

import rlflow
from benchmarks.fixes import Case, applied, broken_fixes, infeasible_cases, is_true
from rlflow.errors import PlacementError
from rlflow.recipe.compose import load_cluster
from tests.helpers import load


def refused(*overrides: str, cluster: str) -> PlacementError:
    """Return why a recipe does not fit, after its fixes were applied and found to work."""
    with pytest.raises(PlacementError) as caught:
        rlflow.compile(load(*overrides), cluster)
    base: list[str] = []
    pins: list[str] = []
    for override in overrides:
        (pins if override.startswith("roles.") else base).append(override)
    case = Case(tuple(base), tuple(pins), load_cluster(cluster))
    assert broken_fixes(case, caught.value) == []
    return caught.value


@pytest.mark.slow
def test_a_smallest_set_of_pins_that_conflict() -> None:
    """The state of a 7B model is 18 bytes a parameter, 128 GiB: one GPU cannot hold it without offload.

    Two can, with 64 GiB of state on each and ten for what moves and for the error of predictions.
    """
    pins = ("roles.actor.gpus=1", "roles.actor.offload=none", "roles.actor.zero_stage=3")
    error = refused("recipe=grpo_7b", *pins, cluster="1x8")
    assert "roles.actor.gpus=1 and roles.actor.offload=none conflict on 1x8" in error.fact
    assert "zero_stage" not in error.fact
    assert str(error.notes["Fix"]).startswith("roles.actor.gpus=2")


@pytest.mark.slow
def test_a_number_of_gpus_that_the_cluster_does_not_have() -> None:
    error = refused("recipe=grpo_7b", "roles.rollout.gpus=64", cluster="2x8")
    assert (error.path, error.fact) == ("roles.rollout.gpus", "64 does not fit 2x8@h100_80gb")
    assert error.notes["Fix"] == "roles.rollout.gpus=16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "cluster", "fix"),
    [
        ("qwen2_5_0_5b", "1x8@v100_32gb", "models.policy.dtype=float32"),
        ("qwen2_5_3b", "1x8@v100_16gb", "models.policy.dtype=float32"),
        ("qwen2_5_7b", "1x1@v100_16gb", "models.policy.dtype=float32 cluster=15x1@v100_16gb"),
    ],
)
def test_gpus_without_bfloat16(policy: str, cluster: str, fix: str) -> None:
    """A V100 has no bfloat16, and vLLM refuses it there. Where 28 GiB fit no host, engines span several."""
    error = refused("recipe=grpo_7b", f"model@models.policy={policy}", cluster=cluster)
    assert (error.path, error.fact) == ("models.policy.dtype", f"{cluster[4:]} cannot compute in bfloat16")
    assert str(error.notes["Fix"]).startswith(fix)


@pytest.mark.slow
def test_gpus_without_bfloat16_are_left_out_of_a_mixed_cluster() -> None:
    plan = rlflow.compile(load("recipe=grpo_7b"), "1x8@v100_32gb+1x8@a100_80gb")
    assert {bundle.host for role in plan.roles.values() for bundle in role.bundles} == {"host-1"}
    assert "8 GPUs of the cluster not used" in plan.prediction.warnings
    error = refused("recipe=grpo_7b", "roles.actor.label=v100_32gb", cluster="1x8@v100_32gb+1x8@a100_80gb")
    assert error.fact == "no host has the labels 'bfloat16' and 'v100_32gb'"


@pytest.mark.slow
def test_conditions_of_other_accelerators_are_stated() -> None:
    for kind, condition in (("mi300x", "ROCm"), ("ascend_910b", "rlflow does not run on NPUs")):
        plan = rlflow.compile(load("recipe=grpo_7b"), f"1x8@{kind}")
        assert any(warning.startswith(f"{kind}: ") and condition in warning for warning in plan.prediction.warnings)


def test_a_model_of_unknown_size() -> None:
    with pytest.raises(PlacementError, match=r"^roles\.actor\.model: its architecture is not known") as raised:
        rlflow.compile(load("recipe=grpo_7b", "models.policy.path=some/model", "~models.policy.architecture"), "1x8")
    assert "`hf download some/model config.json`" in str(raised.value)


@pytest.mark.slow
def test_the_nearest_group_is_proposed() -> None:
    error = refused("recipe=grpo_7b", "roles.rollout.tensor_parallel_size=12", cluster="2x8")
    # The model has 28 heads and 4 key-value heads: of the degrees up to 8, four is the largest that divides both.
    assert "12 GPUs of one tensor-parallel group do not fit on one host" in error.fact
    assert error.notes["Fix"] == "roles.rollout.tensor_parallel_size=4"


@pytest.mark.slow
def test_two_conflicts_are_solved_together() -> None:
    """No host has either label, so removing only one of them does not help."""
    error = refused("recipe=grpo_7b", "roles.actor.label=fast", "roles.rollout.label=slow", cluster="1x8")
    assert error.notes["Fix"] == "roles.actor.label=null roles.rollout.label=null"


@pytest.mark.slow
def test_two_micro_batches_that_are_too_small() -> None:
    """The longest sequence has 512 tokens of a prompt and 2048 of a response."""
    pins = [f"roles.{role}.micro_batch_tokens=512" for role in ("actor", "critic")]
    error = refused("recipe=ppo_7b", *pins, cluster="1x8")
    assert "no room for the longest sequence, which has 2560" in error.fact
    assert str(error.notes["Fix"]).count("micro_batch_tokens=") == 2


@pytest.mark.slow
def test_the_memory_that_is_missing_is_measured_by_planning() -> None:
    """An engine on one GPU holds all weights of 32.8B parameters there, 61 GiB, and some room for one sequence."""
    error = refused("recipe=grpo_lora_32b", cluster="1x1@a100_40gb")
    assert error.path == "roles.rollout"
    assert error.fact.startswith("nothing fits 1x1@a100_40gb (rollout needs GPUs with at least ")
    needed = int(error.fact.split("needs GPUs with at least ")[1].split(" GiB")[0])
    assert 61 < needed < 80
    # More hosts of one GPU do not help: an engine is on one host.
    assert str(error.notes["Fix"]).startswith("1 host of 8 GPUs with ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "role"),
    [
        (("roles.actor.zero_stage=2",), "actor"),
        (("roles.actor.zero_stage=2", "roles.reference.zero_stage=3"), "actor"),
        (("roles.reference.zero_stage=0",), "reference"),
        (("roles.rollout.tensor_parallel_size=1", "roles.rollout.pipeline_parallel_size=1"), "rollout"),
    ],
)
def test_the_reason_is_the_role_of_the_pin(pins: tuple[str, ...], role: str) -> None:
    """Each of the pins keeps all 131 GiB of the weights on a GPU; some plan is also short of room for another role."""
    error = refused("recipe=grpo_32b", "model@models.policy=llama3_1_70b", *pins, cluster="9x8@a100_80gb")
    assert error.path == pins[0].partition("=")[0]
    assert f"({role} needs GPUs with at least " in error.fact


@pytest.mark.slow
def test_shorter_responses() -> None:
    """A pass over 64,096 tokens does not fit on one GPU, and one over 31,000 does."""
    error = refused("recipe=rm_7b", "expect.response_tokens=[30000]", cluster="1x1@rtx_4090")
    hosts, shorter = str(error.notes["Fix"]).split(", or ")
    assert hosts.startswith("1 host of 8 GPUs with")
    # Offloaded state needs host memory that nobody stated.
    assert shorter.startswith("expect.response_tokens=[1")
    assert shorter.endswith("] (tight)")


@pytest.mark.slow
def test_random_recipes() -> None:
    """One of those that ``benchmarks.fixes`` draws, from another seed."""
    for case, error in infeasible_cases(1, seed=11):
        assert broken_fixes(case, error) == []
        assert is_true(case, error)


def test_a_fix_is_applied_as_printed() -> None:
    case = Case(("recipe=grpo_7b",), ("roles.actor.gpus=3",), load_cluster("1x2@h200"))
    recipe, cluster = applied(case, "roles.actor.gpus=4 and 2 more hosts like host-0 with all 2 GPUs free")
    assert recipe.roles["actor"].gpus == 4
    assert [host.gpus for host in cluster.hosts] == [2, 2, 2]
    recipe, cluster = applied(case, "3 hosts of 8 GPUs with 100 GiB each")
    assert [host.gpus for host in cluster.hosts] == [8, 8, 8]
    assert cluster.memory_gib(cluster.hosts[0]) == 100
