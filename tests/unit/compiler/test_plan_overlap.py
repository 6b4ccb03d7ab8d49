"""Generation ahead of training in recipes and plans."""

import json

import pytest

import rlflow
from rlflow.compiler.plan import Plan, plan_from
from rlflow.compiler.what_if import gain_of_overlap
from rlflow.errors import UserError
from tests.conftest import CONFIG_DIR
from tests.helpers import load, problem_of

KEEP = "overlap={max_staleness: 2, in_flight: keep, deterministic: false}"


def compiled(*overrides: str, recipe: str = "fake", cluster: str = "1x2@cpu") -> Plan:
    return rlflow.compile(load(f"recipe={recipe}", *overrides, config_dir=CONFIG_DIR), cluster)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["overlap.max_staleness=-1"], r"^overlap\.max_staleness: -1 is not valid"),
        (["overlap.staleness=1"], r"^overlap\.staleness: unknown key.\n.*\n  Fix: max_staleness"),
        ([KEEP], r"^overlap\.in_flight: expected an engine that can be interrupted, got 'fake' for graph\.rollouts"),
        (
            ["overlap={max_staleness: 1, in_flight: keep}", "roles.rollout.engine=vllm"],
            r"^overlap\.in_flight: 'keep' lets .*\n  Fix: overlap\.deterministic=false, or overlap\.in_flight=wait",
        ),
        (
            ["overlap.max_staleness=1", "graph.rollouts.role=actor", "~roles.rollout"],
            r"^overlap\.max_staleness: role 'actor' of graph\.rollouts is trained itself",
        ),
        (
            ["overlap.max_staleness=1", "graph.reference.role=rollout", "~roles.reference"],
            r"^overlap\.max_staleness: role 'rollout' also runs graph\.reference",
        ),
        (
            ["overlap.max_staleness=1", "graph.sampling={node: dynamic_sampling}"],
            r"^overlap\.max_staleness: graph\.sampling chooses the prompts of a step by their rewards",
        ),
    ],
)
def test_recipes_that_cannot_generate_ahead(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compiled(*overrides)


def test_generation_takes_turns_with_training_where_they_share_gpus() -> None:
    one_gpu = compiled("overlap.max_staleness=2", cluster="1x1@cpu")
    assert (one_gpu.takes_turns, one_gpu.steps_per_turn) == (True, 3)
    named = compiled("overlap.max_staleness=2", "roles.rollout.colocate=[actor]")
    assert named.takes_turns
    apart = compiled("overlap.max_staleness=2", "roles.rollout.colocate=[]")
    assert (apart.takes_turns, apart.steps_per_turn) == (False, 1)
    assert not compiled(cluster="1x1@cpu").takes_turns


@pytest.mark.slow
def test_turns_of_several_steps_share_the_end_of_a_generation() -> None:
    """Engines generate other samples while the longest responses of a step end, and weights are synced once a turn."""
    shared = ("roles.rollout.colocate=[actor]", "roles.reference.colocate=[actor]")
    synchronous = rlflow.compile(load("recipe=grpo_32b", *shared), "2x8").prediction
    ahead = rlflow.compile(load("recipe=grpo_32b", *shared, "overlap.max_staleness=4"), "2x8").prediction
    assert ahead.overlap is not None
    assert ahead.overlap.takes_turns
    assert ahead.overlap.by_staleness["0"] == pytest.approx(synchronous.step_seconds, rel=0.02)
    sync = ahead.nodes["actor->rollout"].seconds
    assert ahead.step_seconds < synchronous.step_seconds - 0.8 * sync
    assert ahead.overlap.staleness == 2.0
    assert "take turns on shared GPUs" in ahead.reasons[0]


def test_the_default_is_no_part_of_the_experiment() -> None:
    assert compiled().fingerprint == compiled("overlap={max_staleness: 0, in_flight: keep}").fingerprint
    assert compiled().fingerprint != compiled("overlap.max_staleness=1").fingerprint


@pytest.mark.slow
def test_the_role_that_generates_has_gpus_of_its_own_unless_that_is_slower() -> None:
    """Roles that stay side by side lose no time to turns, so that sharing can be faster."""
    for recipe in ("grpo_7b", "ppo_7b"):
        given = (f"recipe={recipe}", "overlap.max_staleness=1")
        plan = rlflow.compile(load(*given), "2x8")
        gpus = {role: set(placement.bundles) for role, placement in plan.roles.items()}
        is_apart = all(gpus["rollout"].isdisjoint(gpus[role]) for role in gpus if role != "rollout")
        apart = rlflow.compile(load(*given, "roles.rollout.colocate=[]"), "2x8")
        assert is_apart or plan.prediction.step_seconds < apart.prediction.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_no_other_way_to_share_has_a_shorter_step_when_both_are_simulated(staleness: int) -> None:
    def step(*pins: str) -> float:
        recipe = load("recipe=grpo_32b", f"overlap.max_staleness={staleness}", *pins)
        return rlflow.compile(recipe, "4x8").prediction.step_seconds

    apart, shared = "roles.{}.colocate=[]", "roles.{}.colocate=[actor]"
    ways = [
        (rollout.format("rollout"), other.format("reference"))
        for rollout in (apart, shared)
        for other in (apart, shared)
    ]
    assert step() <= 1.01 * min(step(*pins) for pins in ways)


@pytest.mark.slow
def test_no_other_size_or_width_of_engines_has_a_shorter_step_when_all_are_simulated() -> None:
    """With tokens of older versions, the schedule of a single step prefers 16 GPUs that generate."""
    given = (
        "recipe=grpo_7b",
        "model@models.policy=llama3_1_70b",
        "data.batch_size=64",
        "graph.rollouts.max_tokens=1024",
        "overlap={max_staleness: 1, in_flight: keep, deterministic: false}",
        "roles.rollout.colocate=[]",
    )

    def step(*pins: str) -> float:
        return rlflow.compile(load(*given, *pins), "8x8@h200").prediction.step_seconds

    sizes = (f"roles.rollout.gpus={gpus}" for gpus in (16, 24, 32))
    assert step() <= 1.01 * min(
        step(size, f"roles.rollout.tensor_parallel_size={width}") for size in sizes for width in (4, 8)
    )


def test_an_engine_has_room_for_all_steps_that_it_generates_at_once() -> None:
    """Two engines share 512 samples, or those of three steps where unfinished samples keep their tokens."""
    apart = ("recipe=grpo_7b", "data.batch_size=64", "roles.rollout={gpus: 4, colocate: [], tensor_parallel_size: 2}")

    def sequences(*options: str) -> int | None:
        return rlflow.compile(load(*apart, *options), "1x8").prediction.memory["rollout"].sequences

    keep = "overlap={max_staleness: 2, in_flight: keep, deterministic: false}"
    assert [sequences(), sequences("overlap.max_staleness=2"), sequences(keep)] == [256, 256, 768]


@pytest.mark.slow
def test_gpus_that_would_slow_the_last_pool_down_stay_idle() -> None:
    """Engines of 8 leave 4 of 12 GPUs idle, and training is faster on the other 20 than on 24."""
    given = (
        "recipe=grpo_7b",
        "model@models.policy=llama3_1_70b",
        "data.batch_size=64",
        "graph.rollouts.max_tokens=4096",
        "overlap.max_staleness=4",
        "roles.rollout.colocate=[]",
    )
    chosen, smaller = (
        rlflow.compile(load(*given, *pins), "4x8@a100_80gb").prediction.step_seconds
        for pins in ((), ("roles.rollout.gpus=12", "roles.rollout.tensor_parallel_size=4"))
    )
    assert chosen <= 1.01 * smaller


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_longer_side_and_the_weight_sync() -> None:
    # Sides that take equally long on average wait for each other in turns, so training is longer here.
    pins = (
        "roles.rollout.colocate=[]",
        "roles.rollout.gpus=8",
        "roles.rollout.data_parallel_size=2",
        "graph.update.score_first_minibatch=true",
    )
    plan = rlflow.compile(load("recipe=grpo_32b", "overlap.max_staleness=1", *pins), "2x8")
    nodes, overlap = plan.prediction.nodes, plan.prediction.overlap
    assert overlap is not None
    training = sum(nodes[name].seconds for name in ("old_logprobs", "reference", "update"))
    assert training > nodes["rollouts"].seconds
    assert plan.prediction.step_seconds == pytest.approx(training + nodes["actor->rollout"].seconds, rel=0.01)
    assert overlap.by_staleness["0"] > 0.99 * (nodes["rollouts"].seconds + training)


@pytest.mark.slow
def test_neither_side_is_idle_for_long() -> None:
    pins = ("roles.rollout.colocate=[]", "graph.update.score_first_minibatch=true")
    overlap = rlflow.compile(load("recipe=grpo_32b", "overlap.max_staleness=1", *pins), "2x8").prediction.overlap
    assert overlap is not None
    assert max(overlap.generate_idle, overlap.train_idle) < 0.25
    assert overlap.recommended == 1


@pytest.mark.slow
def test_explain_says_what_overlap_would_bring() -> None:
    problem = problem_of(load("recipe=grpo_7b"), "2x8")
    told = gain_of_overlap(problem)
    assert told is not None
    assert told.startswith("overlap.max_staleness=1: ")
    ahead = rlflow.compile(load("recipe=grpo_7b", "overlap.max_staleness=1"), "2x8").prediction.step_seconds
    synchronous = rlflow.compile(load("recipe=grpo_7b"), "2x8").prediction.step_seconds
    assert f"{ahead:.4g} s, {1 - ahead / synchronous:.0%} less (" in told
    assert gain_of_overlap(problem_of(load("recipe=dapo_32b"), "2x8")) is None
    one_gpu = gain_of_overlap(problem_of(load("recipe=grpo_tiny"), "local"))
    assert one_gpu is not None
    assert one_gpu.endswith("the same (all roles colocated on 1)")


@pytest.mark.slow
def test_alternatives_are_slower_than_the_simulated_step_by_what_they_say() -> None:
    for overrides, cluster in ((["roles.rollout.colocate=[]"], "4x8@h200"), ([], "1x8")):
        plan = rlflow.compile(load("recipe=grpo_7b", "overlap.max_staleness=1", *overrides), cluster)
        fits = [each for each in plan.prediction.alternatives if each.step_seconds is not None]
        assert fits
        for each in fits:
            slower = (each.step_seconds or 0.0) / plan.prediction.step_seconds - 1
            assert slower > -1e-9
            assert each.loses.startswith(f"{slower:.0%} slower") == (slower >= 0.005)


@pytest.mark.slow
def test_a_plan_with_overlap_can_be_read_back() -> None:
    plan = rlflow.compile(load("recipe=grpo_32b", "overlap.max_staleness=1"), "2x8")
    assert plan_from(json.loads(json.dumps(plan.to_dict()))) == plan
