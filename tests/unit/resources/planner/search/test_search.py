"""The search, on clusters and with pins whose best plan is known."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.planner.candidate import Candidate
from rlflow.resources.planner.search.search import Search
from tests.unit.resources.planner.planning import H100, SEVEN_B, check, cluster, demand, place, search, workload


@pytest.mark.parametrize(
    ("gpus", "size", "engines"),
    [((6, 6), 4, 2), ((7, 5), 4, 2), ((4, 8, 4), 8, 1), ((8, 8), 6, 2), ((6, 6, 4), 4, 3), ((4, 2), 2, 3)],
)
def test_as_many_engines_as_hosts_hold(gpus: tuple[int, ...], size: int, engines: int) -> None:
    on = cluster(*gpus)
    placed = place([demand("rollout", tensor_parallel_size=size)], on)
    assert placed is not None
    assert len(placed.roles["rollout"].workers) == engines
    check(placed.roles["rollout"], on)


@pytest.mark.slow
@given(
    gpus=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    size=st.sampled_from([1, 2, 3, 4, 6, 8]),
    taken=st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_engines_equal_brute_force(gpus: list[int], size: int, taken: random.Random) -> None:
    """Uneven and partly occupied hosts get as many engines as a count by hand gives, and none spans two hosts."""
    free = [tuple(g for g in range(count) if taken.random() < 0.8) for count in gpus]
    hosts = [Host(name=f"h{i}", gpus=n, gpu="h100", free=f) for i, (n, f) in enumerate(zip(gpus, free, strict=True))]
    on = Cluster(hosts=tuple(hosts), gpus={"h100": H100})
    possible = sum(len(ids) // size for ids in free)
    if not any(free):
        return
    if size > max(len(ids) for ids in free):
        with pytest.raises(PlacementError, match=f"{size}"):
            place([demand("rollout", tensor_parallel_size=size)], on)
        return
    placed = place([demand("rollout", tensor_parallel_size=size)], on)
    assert placed is not None
    assert len(placed.roles["rollout"].workers) == possible
    check(placed.roles["rollout"], on)


def test_actor_4_and_rollout_12_on_two_hosts_of_8() -> None:
    on = cluster(8, 8)
    demands = [demand("actor", gpus=4), demand("reference"), demand("rollout", gpus=12, tensor_parallel_size=4)]
    placed = place(demands, on)
    assert placed is not None
    assert len(placed.roles["rollout"].workers) == 3
    assert len({bundle.host for bundle in placed.roles["actor"].bundles}) == 1
    apart = [*placed.roles["actor"].bundles, *placed.roles["rollout"].bundles]
    assert len(set(apart)) == 16
    for each in placed.roles.values():
        check(each, on)


def test_six_and_two_on_each_of_two_hosts() -> None:
    """Engines of 6 leave 2 GPUs on either host for the actor: there is no other way."""
    on = cluster(8, 8)
    placed = place([demand("actor", gpus=4), demand("rollout", gpus=12, tensor_parallel_size=6)], on)
    assert placed is not None
    assert Counter(bundle.host for bundle in placed.roles["rollout"].bundles) == {"host-0": 6, "host-1": 6}
    assert Counter(bundle.host for bundle in placed.roles["actor"].bundles) == {"host-0": 2, "host-1": 2}


def test_all_gpus_of_uneven_hosts_are_used() -> None:
    placed = place([demand("actor", SEVEN_B), demand("rollout", SEVEN_B, tensor_parallel_size=1)], cluster(*[8] * 7, 7))
    assert placed is not None
    assert len({bundle for role in placed.roles.values() for bundle in role.bundles}) == 63


def test_a_host_of_4_and_one_of_2() -> None:
    on = cluster(4, 2)
    placed = place([demand("actor"), demand("rollout", tensor_parallel_size=2)], on)
    assert placed is not None
    for each in placed.roles.values():
        check(each, on)


def test_the_pipeline_stages_of_an_engine_are_on_one_host() -> None:
    """Five GPUs of a host hold two stages of two; hosts of 6 and 5 have room for one engine each."""
    placed = place([demand("rollout", tensor_parallel_size=2, pipeline_parallel_size=2)], cluster(6, 5))
    assert placed is not None
    workers = placed.roles["rollout"].workers
    assert [{bundle.host for bundle in worker.bundles} for worker in workers] == [{"host-0"}, {"host-1"}]
    assert all(len(worker.bundles) == 4 for worker in workers)


def test_stages_that_exceed_a_host_are_spread_evenly() -> None:
    """Four stages of four GPUs: two stages on each of two hosts. A third host has room for half an engine."""
    wants: dict[str, Any] = {"tensor_parallel_size": 4, "pipeline_parallel_size": 4}
    placed = place([demand("rollout", SEVEN_B, **wants)], cluster(8, 8, 8))
    assert placed is not None
    rollout = placed.roles["rollout"]
    [engine] = rollout.workers
    assert rollout.layout.hosts_per_engine == 2
    assert [{bundle.host for bundle in gpus} for gpus in engine.on_hosts(rollout.layout)] == [{"host-0"}, {"host-1"}]
    assert [bundle.gpu for bundle in engine.bundles] == [*range(8), *range(8)]
    assert place([demand("rollout", SEVEN_B, data_parallel_size=2, **wants)], cluster(8, 8, 8)) is None


def test_free_gpus_reserved_hosts_and_labels() -> None:
    hosts = (
        Host(name="a", gpus=8, gpu="h100", free=(2, 3, 5, 7)),
        Host(name="b", gpus=8, gpu="h100", reserved=True),
        Host(name="c", gpus=8, gpu="h100", labels=("fast",)),
    )
    on = Cluster(hosts=hosts, gpus={"h100": H100})
    placed = place([demand("actor", label="fast"), demand("rollout", tensor_parallel_size=2)], on)
    assert placed is not None
    assert {bundle.host for bundle in placed.roles["actor"].bundles} == {"c"}
    assert "b" not in {bundle.host for role in placed.roles.values() for bundle in role.bundles}
    for each in placed.roles.values():
        check(each, on)


def test_labels_nobody_has_are_named() -> None:
    with pytest.raises(PlacementError, match="no host has the label 'quick'") as caught:
        place([demand("actor", label="quick")], cluster(8))
    assert caught.value.path == "roles.actor.label"


def test_pinned_values_are_kept() -> None:
    pins: dict[str, Any] = {
        "zero_stage": 2,
        "micro_batch_tokens": 5000,
        "gradient_checkpointing": True,
        "sequence_parallel_size": 2,
        "offload": "optimizer",
    }
    demands = [
        demand("actor", SEVEN_B, gpus=8, **pins),
        demand("rollout", SEVEN_B, gpus=8, tensor_parallel_size=2, gpu_memory_utilization=0.7),
    ]
    placed = place(demands, cluster(8, 8))
    assert placed is not None
    layout = placed.roles["actor"].layout
    assert {name: getattr(layout, name) for name in pins} == pins
    assert placed.roles["rollout"].layout.gpu_memory_utilization == 0.7
    assert placed.roles["rollout"].layout.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("wants", "path", "said"),
    [
        ({"tensor_parallel_size": 12}, "roles.rollout", "12 GPUs of one tensor-parallel group do not fit on one host"),
        ({"tensor_parallel_size": 5}, "roles.rollout.tensor_parallel_size", "24 attention heads"),
        ({"gpus": 6, "tensor_parallel_size": 4}, "roles.rollout.gpus", "tensor_parallel_size 4"),
    ],
)
def test_pins_that_contradict_themselves(wants: dict[str, Any], path: str, said: str) -> None:
    with pytest.raises(PlacementError, match=said) as caught:
        place([demand("actor"), demand("rollout", **wants)], cluster(8, 8))
    assert caught.value.path == path


def test_what_sleeps_makes_room() -> None:
    """32 GiB of state a GPU beside an engine: on one host of 4 the engine's keys and values need the actor asleep."""
    demands = [demand("actor", SEVEN_B), demand("rollout", SEVEN_B)]
    placed = place(demands, cluster(4), longest=16384, samples=2048)
    assert placed is not None
    assert placed.roles["actor"].layout.sleeps


@pytest.mark.slow
def test_the_same_plan_for_the_same_input_in_any_order() -> None:
    demands = [demand("actor", SEVEN_B), demand("reference", SEVEN_B), demand("rollout", SEVEN_B)]
    plans: set[str] = set()
    for _ in range(3):
        random.Random(len(plans)).shuffle(demands)
        on = cluster(8, 8)
        plans.add(repr(Search(demands, workload(sorted(demands, key=lambda d: d.role)), on, {}).best()))
    assert len(plans) == 1


def test_faster_links_never_make_a_slower_plan() -> None:
    demands = [demand("actor", SEVEN_B), demand("rollout", SEVEN_B)]
    slow, fast = cluster(8, 8), cluster(8, 8)
    fast = replace(fast, gpus={"h100": replace(H100, network_gb_s=400)})
    slower, faster = place(demands, slow, longest=4096), place(demands, fast, longest=4096)
    assert slower is not None
    assert faster is not None
    assert faster.candidate.schedule.step_seconds <= slower.candidate.schedule.step_seconds


@pytest.mark.slow
def test_more_hosts_never_make_a_slower_plan() -> None:
    demands = [demand("actor", SEVEN_B), demand("reference", SEVEN_B), demand("rollout", SEVEN_B)]
    times = []
    for hosts in (1, 2, 4):
        placed = place(demands, cluster(*[8] * hosts), longest=4096, samples=2048)
        assert placed is not None
        times.append(placed.candidate.schedule.step_seconds)
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_of_very_many_that_are_as_fast_not_all_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four roles whose step is the latency of a copy to other GPUs."""
    placed: list[Candidate] = []
    place_one = Search._place

    def noted(of: Search, candidate: Candidate) -> Any:
        placed.append(candidate)
        return place_one(of, candidate)

    monkeypatch.setattr(Search, "_place", noted)
    demands = [*(demand(role) for role in ("actor", "critic", "reference")), demand("rollout", colocate=())]
    searched = search(demands, cluster(8, 8), longest=32, samples=64)
    assert searched.best() is not None
    seconds = [each.schedule.step_seconds for each in searched.candidates()]
    assert len(placed) == 64 < sum(each <= 1.01 * min(seconds) for each in seconds)
