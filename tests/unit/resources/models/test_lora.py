"""The planner's figures of adapters, by hand for Qwen2.5-7B: hidden 3584, keys 512, MLP 18944, 28 layers."""

from dataclasses import replace

import pytest

import rlflow
from benchmarks.published.libraries import DEEPSPEED
from rlflow.compiler.checks import check
from rlflow.compiler.lower import Requirements, lower
from rlflow.compiler.wire import wire
from rlflow.errors import UserError
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.overheads import sync_terms
from rlflow.resources.memory.phases import generate_memory, update_terms
from rlflow.resources.models.lora import Lora, adapter_inputs, adapter_parameters, adapter_tensors
from rlflow.resources.planner.prediction.task_times import task_seconds
from rlflow.resources.planner.search.search import Search
from tests.helpers import load
from tests.unit.resources.planner.planning import SEVEN_B, cluster

QUERIES_AND_VALUES = Lora(rank=16, target_modules=("q_proj", "v_proj"))
ATTENTION = 2 * (3584 + 3584) + 2 * (3584 + 512)
MLP = 3 * (3584 + 18944)
ON_ONE = Layout(micro_batch_tokens=4096, zero_stage=0, offload="none", gradient_checkpointing=True)
RANK_16 = Lora(rank=16)
MOE, MERGED_EXPERTS = "model@models.policy=qwen3_30b_a3b", "{experts: true, merge: true}"
ADAPTERS_GIB = 4 * 16 * 28 * (ATTENTION + MLP) / GIB


def required(*overrides: str) -> Requirements:
    recipe = load("recipe=grpo_7b", *overrides)
    graph = wire(recipe)
    check(recipe, graph)
    return lower(recipe, graph)


def test_adapters_stand_beside_the_layers_that_are_named() -> None:
    assert adapter_parameters(SEVEN_B, RANK_16) == 16 * 28 * (ATTENTION + MLP)
    assert adapter_tensors(SEVEN_B, RANK_16) == 2 * 28 * 7
    some = Lora(rank=16, target_modules=("q_proj", "v_proj"))
    assert adapter_parameters(SEVEN_B, some) == 16 * 28 * ((3584 + 3584) + (3584 + 512))
    assert adapter_tensors(SEVEN_B, some) == 2 * 28 * 2


def test_an_update_has_state_for_adapters_alone() -> None:
    """Weights that stand still in bf16, adapters with gradients and moments in fp32; nothing is widened in the step."""
    terms = update_terms(SEVEN_B, ON_ONE, replace(DEEPSPEED, lora=RANK_16), 4096)
    assert terms["weights"] == pytest.approx(2 * SEVEN_B.num_parameters / GIB + ADAPTERS_GIB)
    assert terms["gradients"] == pytest.approx(ADAPTERS_GIB)
    assert terms["optimizer"] == pytest.approx(2 * ADAPTERS_GIB)
    assert terms["gathered"] == 0
    # Activations are those of a model all of whose weights are trained.
    whole = update_terms(SEVEN_B, ON_ONE, DEEPSPEED, 4096)
    assert sum(terms.values()) < sum(whole.values()) / 3


def test_inputs_are_copied_where_adapters_have_another_type() -> None:
    """peft converts each adapted layer's input to float32; six of them have 3584 values and the last one 18944."""
    assert adapter_inputs(SEVEN_B, RANK_16, SEVEN_B.layer_kinds[0]) == 6 * 3584 + 18944
    assert adapter_inputs(SEVEN_B, QUERIES_AND_VALUES, SEVEN_B.layer_kinds[0]) == 2 * 3584
    adapters = replace(DEEPSPEED, lora=RANK_16, fused_loss=True)
    same, copied = (
        update_terms(SEVEN_B, ON_ONE, replace(adapters, adapter_inputs=bytes_), 4096)["activations"]
        for bytes_ in (0.0, 4.0)
    )
    # One layer is recomputed at a time.
    assert copied - same == pytest.approx(4 * 4096 * (6 * 3584 + 18944) / GIB)


def test_an_engine_holds_them_beside_its_weights() -> None:
    layout = Layout(micro_batch_tokens=1, gpu_memory_utilization=0.9)
    without, beside = (generate_memory(SEVEN_B, layout, 80, lora=lora) for lora in (None, RANK_16))
    assert beside.terms["adapters"] == pytest.approx(ADAPTERS_GIB / 2)
    assert without.terms["kv"] - beside.terms["kv"] == pytest.approx(ADAPTERS_GIB / 2)


def test_what_is_gathered_for_an_engine_is_the_adapters() -> None:
    terms = sync_terms(SEVEN_B, ON_ONE, replace(DEEPSPEED, lora=RANK_16))
    assert terms["gathered"] == pytest.approx(ADAPTERS_GIB / 2)


def test_a_role_that_follows_has_the_adapters_of_the_one_before_it() -> None:
    demands = {demand.role: demand for demand in required("roles.actor.lora={rank: 8}").demands}
    assert demands["actor"].training.lora == demands["rollout"].follows_lora == Lora(rank=8)
    assert demands["actor"].follows_lora is demands["reference"].training.lora is None


@pytest.mark.parametrize("engine", ["deepspeed", "torch"])
def test_weights_have_the_type_of_the_model(engine: str) -> None:
    def weights(*overrides: str) -> float:
        demands = required(f"roles.actor.engine={engine}", *overrides).demands
        return next(demand for demand in demands if demand.role == "actor").training.weights

    assert weights() == weights("roles.actor.lora={}") == 2
    assert weights("models.policy.dtype=float32") == weights("roles.actor.lora={}", "models.policy.dtype=float32") == 4


def test_the_backward_pass_makes_no_gradients_of_weights() -> None:
    """The kernels of adapters take what these save: LoRA steps of Qwen3-4B on H100 are 1.07 times as long as full ones.

    prime-rl, benchmarks/baselines: 5.38 and 5.01 s with micro-batches of 16,384 tokens.
    """

    def seconds(*overrides: str) -> float:
        requirements = required(*overrides)
        demand = next(demand for demand in requirements.demands if demand.role == "actor")
        tasks = [task for task in requirements.workload.tasks if task.kind == "update"]
        speed = Search(requirements.demands, requirements.workload, cluster(8), {}).inputs.host_set(["actor"]).speed
        layout = replace(ON_ONE, data_parallel_size=8, zero_stage=2, micro_batch_tokens=16384)
        return sum(task_seconds(demand, tasks, layout, speed, kv_tokens=0).values())

    assert seconds("roles.actor.lora={}") / seconds() == pytest.approx(1.07, abs=0.1)


def test_the_copy_takes_the_time_of_its_bytes() -> None:
    """A second of waking up, and 0.7 ms for each of 28 x 14 small tensors: there is room for all roles at once."""

    def seconds(*overrides: str) -> float:
        room = "roles.rollout.gpu_memory_utilization=0.4"
        plan = rlflow.compile(load("recipe=grpo_7b", room, *overrides), cluster(8))
        return plan.prediction.nodes["actor->rollout"].seconds

    assert seconds("roles.actor.lora={}") == pytest.approx(1 + 28 * 14 * 0.7e-3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles.actor.lora={rank: 0}", "roles.actor.lora.rank: 0 is not valid"),
        ("roles.actor.lora={alpha: 0}", "roles.actor.lora.alpha: 0 is not valid"),
        ("roles.actor.lora={target_modules: []}", "roles.actor.lora.target_modules"),
        ("roles.actor.lora={dropout: 0.1}", "roles.actor.lora.dropout: unknown key"),
        ("roles.reference.lora={}", "roles.reference.lora: the role is never trained"),
        (
            "graph.reference={node: base_logprobs, role: actor}",
            "roles.actor.lora: is missing, and a node asks for the logprobs",
        ),
    ],
)
def test_adapters_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        required(override)
    assert str(caught.value).startswith(message)


def test_experts_have_adapters_if_they_are_asked_for() -> None:
    """Qwen3-30B-A3B: hidden 2048, queries 4096, keys 512; 128 experts of width 768 whose gate and up are one weight."""
    [actor] = [demand for demand in required(MOE, "roles.actor.lora={}").demands if demand.role == "actor"]
    model, attention = actor.architecture, 2 * (2048 + 4096) + 2 * (2048 + 512)
    assert model is not None
    assert adapter_parameters(model, RANK_16) == 16 * 48 * attention
    assert adapter_tensors(model, RANK_16) == 2 * 48 * 4
    of_experts, experts = replace(RANK_16, experts=True), 128 * ((2048 + 2 * 768) + (768 + 2048))
    assert adapter_parameters(model, of_experts) == 16 * 48 * (attention + experts)
    assert adapter_tensors(model, of_experts) == 2 * 48 * 6


def test_a_pass_copies_a_layer_of_experts_with_adapters() -> None:
    """A copy in bf16, and as many gradients, of three matrices for each of 128 experts."""
    plain, copied = (
        next(demand for demand in required(MOE, f"roles.actor.lora={lora}").demands if demand.role == "actor")
        for lora in ("{merge: true}", MERGED_EXPERTS)
    )
    assert plain.architecture is not None
    terms = (update_terms(plain.architecture, ON_ONE, demand.training, 4096) for demand in (plain, copied))
    before, after = (term["activations"] for term in terms)
    assert after - before == pytest.approx(2 * 2 * 128 * 3 * 2048 * 768 / GIB)


def test_an_engine_of_merged_weights_has_no_adapters() -> None:
    demands = {demand.role: demand for demand in required("roles.actor.lora={merge: true}").demands}
    assert demands["actor"].training.lora == Lora(merge=True)
    assert demands["rollout"].follows_lora is None
    merged = sync_terms(SEVEN_B, ON_ONE, replace(DEEPSPEED, lora=replace(RANK_16, merge=True)))
    # A part of the model and all adapters, in bf16.
    whole = sync_terms(SEVEN_B, ON_ONE, DEEPSPEED)
    assert merged["gathered"] == pytest.approx(whole["gathered"] + ADAPTERS_GIB / 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "roles.actor.lora={experts: true}",
            "roles.actor.lora.experts: 'vllm' of role 'rollout' does not run adapters of experts beside its model.\n"
            "  Fix: roles.actor.lora.merge=true.",
        ),
        (
            f"roles.actor={{lora: {MERGED_EXPERTS}, expert_parallel_size: 2}}",
            "roles.actor.expert_parallel_size: 2 GPUs cannot divide experts that have adapters.",
        ),
    ],
)
def test_adapters_of_experts_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        rlflow.compile(load("recipe=gspo_30b_a3b", override), cluster(8))
    assert str(caught.value).startswith(message)


def test_vllm_on_a_cpu_has_no_adapters_beside_experts() -> None:
    recipe = load("recipe=gspo_30b_a3b", "roles.actor.lora={}", "models.policy.dtype=float32")
    with pytest.raises(UserError) as caught:
        rlflow.compile(recipe, "1x2@cpu")
    first, *_, last = str(caught.value).splitlines()
    assert first == "roles.rollout.engine: 'vllm' runs no adapters of a model with experts on a CPU."
    assert last == "  Fix: roles.actor.lora.merge=true."


@pytest.mark.slow
def test_fewer_gpus_are_enough() -> None:
    """Two of 80 GB, where all weights of a 32B model, which need 488 GiB with their state, do not fit."""
    whole = rlflow.compile(load("recipe=grpo_32b"), cluster(2)).prediction
    assert whole.verdict == "TIGHT"
    assert any(float(risk.split()[1]) > 488 for risk in whole.risks if "of host memory on host-0" in risk)
    assert rlflow.compile(load("recipe=grpo_lora_32b"), cluster(2)).prediction.num_gpus == 2


@pytest.mark.slow
def test_runs_without_adapters_keep_their_fingerprint() -> None:
    """Checkpoints say by it what they are of."""
    plans = [
        rlflow.compile(load("recipe=grpo_7b", *overrides), cluster(8))
        for overrides in ([], ["roles.actor.lora=null"], ["roles.actor.lora={}"])
    ]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
