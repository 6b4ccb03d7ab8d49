from pathlib import Path

import pytest

import rlflow
from rlflow.errors import RecipeError
from rlflow.recipe.compose import cluster_of_hosts, compose, load_cluster, options_from_config
from tests.conftest import CONFIG_DIR
from tests.helpers import load


@pytest.mark.parametrize(("name", "shape"), [("local", "1x1@cpu"), ("7x8+1x7", "7x8@h100_80gb+1x7@h100_80gb")])
def test_clusters_by_name_and_by_shape(name: str, shape: str) -> None:
    assert load_cluster(name).shape == shape


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "loca",
            "cluster: no cluster 'loca'.\n  Known: auto, local, shapes such as 2x8 or 7x8+1x7@h200.\n  Fix: did you",
        ),
        ("2y8", "cluster: '2y8' is neither a file in conf/cluster nor a shape"),
        ("2x8@h300", "cluster: no gpu 'h300'.\n  Known: a100_40gb, a100_80gb, "),
    ],
)
def test_unknown_clusters(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_cluster(name)
    assert str(raised.value).startswith(message)


@pytest.mark.slow
def test_this_machine() -> None:
    assert cluster_of_hosts({"host-0": []}).shape == "1x1@cpu"
    assert cluster_of_hosts({"host-0": ["NVIDIA H200"] * 4}).shape == "1x4@h200"
    several = cluster_of_hosts({"a": ["NVIDIA H200"] * 8, "b": ["NVIDIA A100-SXM4-80GB"] * 7, "c": []})
    assert several.shape == "1x8@h200+1x7@a100_80gb"
    assert [host.name for host in several.hosts] == ["a", "b"]
    with pytest.raises(RecipeError, match="the GPU 'NVIDIA X' of 'host-0' is unknown"):
        cluster_of_hosts({"host-0": ["NVIDIA X"]})
    with pytest.raises(RecipeError, match="'a' has GPUs of several kinds"):
        cluster_of_hosts({"a": ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]})


def test_kinds_of_gpu_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "x1.yaml").write_text("memory_gib: 10.0\ndevice_name: NVIDIA X\nsource: test\n")
    assert cluster_of_hosts({"host-0": ["NVIDIA X"]}, tmp_path).shape == "1x1@x1"
    assert load_cluster("2x4@x1", tmp_path).gpus["x1"].memory_gib == 10.0


@pytest.mark.parametrize("override", ["dry_run=maybe", "resume=3", "plan=[1]", "tune=sometimes"])
def test_a_wrong_word_at_the_front_door(override: str) -> None:
    with pytest.raises(RecipeError, match=f"^{override.split('=')[0]}: .* is not valid"):
        options_from_config(compose([override]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=grpo_tiny", "lr=1e-3", "roles.actor.optimizer={betas: [0.8, 0.9]}", "seed=3"),
        ("graph.rollouts.max_tokens=64", "model@models.policy=qwen2_5_72b", "recipe=grpo_7b"),
        ("recipe=fake", "~graph.reference", "+graph.more={node: logprobs, role: actor}", "steps=2"),
        ("recipe=fake", "graph.reference.role=actor", "~graph.reference"),
    ],
)
def test_most_tests_set_values_on_a_combined_recipe(overrides: tuple[str, ...]) -> None:
    """Their recipes are those that users load."""
    recipe = load(*overrides, config_dir=CONFIG_DIR)
    assert recipe == rlflow.load(overrides, CONFIG_DIR)
    assert recipe != load(overrides[0], config_dir=CONFIG_DIR)
