"""The specs from which engines are built, and those that are refused."""

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.resources.models.lora import Lora
from rlflow.runtime.engine_specs import gpu_transport, spec_of, synced_parts
from rlflow.runtime.weights.gpu import Receivers
from tests.helpers import load


def plan_of(cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(load("recipe=grpo_7b", *overrides), cluster)


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        (["roles.rollout.colocate=[actor]"], "ipc"),
        (["roles.rollout.colocate=[]"], "nccl"),
    ],
)
def test_weights_go_from_gpu_to_gpu(overrides: list[str], backend: str) -> None:
    plan = plan_of("2x8", *overrides)
    assert gpu_transport(plan, "rollout") == backend
    assert gpu_transport(plan, "actor") is None
    spec = spec_of(plan, "rollout", plan.recipe.models["policy"], device="cuda:0")
    assert spec.gpu_transport == backend


@pytest.mark.parametrize(("cluster", "engine"), [("2x2@cpu", "vllm"), ("2x8", "transformers")])
def test_elsewhere_they_go_through_the_hosts(cluster: str, engine: str) -> None:
    assert gpu_transport(plan_of(cluster, f"roles.rollout.engine={engine}"), "rollout") is None


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["roles.rollout.colocate=[]"], ("language",)),
        (["roles.rollout.colocate=[actor]"], ("language", "tower", "projector")),
        (["roles.rollout.colocate=[]", "roles.actor.train=[language,tower]"], ("language", "tower")),
    ],
)
def test_frozen_parts_are_not_sent(overrides: list[str], parts: tuple[str, ...]) -> None:
    """Engines that share GPUs with the trainer discard them while they sleep, so they need them again."""
    plan = rlflow.compile(load("recipe=grpo_internvl_8b", *overrides), "2x8")
    assert plan.roles["rollout"].layout.sleeps == (len(parts) == 3)
    assert synced_parts(plan, "rollout") == synced_parts(plan, "actor") == parts


@pytest.mark.parametrize("colocate", ["[actor]", "[]"])
def test_adapters_go_through_the_object_store(colocate: str) -> None:
    plan = plan_of("2x8", f"roles.rollout.colocate={colocate}", "roles.actor.lora={rank: 8}")
    assert gpu_transport(plan, "rollout") is None
    specs = {role: spec_of(plan, role, plan.recipe.models["policy"], device="cuda:0") for role in plan.recipe.roles}
    assert specs["actor"].lora == specs["rollout"].lora == Lora(rank=8)
    assert specs["reference"].lora is None


def test_an_engine_gets_its_maximum_length() -> None:
    plan = plan_of("2x8", "data.max_prompt_tokens=100", "graph.rollouts.max_tokens=900")
    model = plan.recipe.models["policy"]
    assert spec_of(plan, "rollout", model, device="cuda:0").max_model_len == 1000
    assert spec_of(plan, "actor", model, device="cuda:0").max_model_len is None
    expected = plan.prediction.memory["rollout"].sequences
    assert expected is not None
    assert spec_of(plan, "rollout", model, device="cuda:0").max_num_seqs == min(expected, 1024)


def test_the_ranks_of_each_receiver_follow_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    receivers = Receivers(["a", "b", "c"], gpus_each=4)
    called: list[tuple[str, list[dict[str, object]]]] = []
    monkeypatch.setattr(receivers, "_call", lambda method, arguments: called.append((method, arguments)))
    receivers.init_weight_transfer_engine({"rank_offset": 1, "world_size": 13})
    receivers.init_weight_transfer_engine({"packed": True})
    assert receivers.num_gpus == 12
    assert [method for method, _ in called] == ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"] * 2
    infos = [{"init_info": {"rank_offset": offset, "world_size": 13}} for offset in (1, 5, 9)]
    assert [arguments for _, arguments in called[1::2]] == [infos, [{"init_info": {"packed": True}}] * 3]
