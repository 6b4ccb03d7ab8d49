"""The bytes in the object stores, calculated by hand."""

from dataclasses import replace

import pytest

from rlflow.resources.layout import GIB, Bundle, Layout, RolePlacement, Worker
from rlflow.resources.planner.prediction.data_placement import predict_data, reading_seconds
from rlflow.resources.planner.prediction.prediction import predict
from rlflow.resources.planner.search.search import Search
from rlflow.resources.workload import Ahead, Edge, Overlap, Workload
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, search, task, workload

LAYOUT = Layout(micro_batch_tokens=1)


def edge(name: str, role: str | None, gib: float, *readers: str) -> Edge:
    return Edge(name=name, role=role, bytes=gib * GIB, stored=gib * GIB, readers=readers)


GRPO = Workload(
    tasks=(
        task("write", "rollout", "generate"),
        task("score", "reference", "score", "write"),
        task("train", "actor", "update", "write", "score"),
    ),
    edges=(
        edge("prompts", None, 1, "write"),
        edge("write", "rollout", 8, "score", "train"),
        edge("score", "reference", 2, "train"),
    ),
)


def placed(**hosts: list[str]) -> dict[str, RolePlacement]:
    return {
        role: RolePlacement(LAYOUT, tuple(Worker((Bundle(host, n),)) for n, host in enumerate(names)))
        for role, names in hosts.items()
    }


def test_an_edge_is_there_until_its_last_reader_is_done() -> None:
    roles = placed(rollout=["a"], reference=["a"], actor=["a"])
    # The prompts and what is written to them; then that and its scores.
    assert predict_data(GRPO, roles, "a").store_peak_gib == pytest.approx({"a": 10})
    longer = replace(GRPO, edges=(edge("prompts", None, 3, "write"), *GRPO.edges[1:]))
    assert predict_data(longer, roles, "a").store_peak_gib == pytest.approx({"a": 11})


def test_what_is_generated_ahead_is_there_for_each_later_step() -> None:
    """Two later steps of 8 GiB each, beside the 10 GiB of the step that trains."""
    ahead = replace(GRPO, ahead=Ahead(nodes=("write",), overlap=Overlap(max_staleness=2)))
    roles = placed(rollout=["a"], reference=["a"], actor=["a"])
    assert predict_data(ahead, roles, "a").store_peak_gib == pytest.approx({"a": 26})


def test_what_nobody_reads_is_there_while_it_is_made() -> None:
    alone = replace(GRPO, edges=(*GRPO.edges[:2], edge("score", "reference", 5)))
    peak = predict_data(alone, placed(rollout=["a"], reference=["a"], actor=["a"]), "a").store_peak_gib
    assert peak == pytest.approx({"a": 13})


def test_it_is_with_those_who_made_it() -> None:
    roles = placed(rollout=["a", "b", "b", "b"], reference=["c"], actor=["a", "b"])
    found = predict_data(GRPO, roles, "controller")
    assert found.store_peak_gib == pytest.approx({"a": 2, "b": 6, "c": 2, "controller": 1})
    assert found.edges == {"prompts": GIB, "write": 8 * GIB, "score": 2 * GIB}


def test_reading_takes_time_between_hosts() -> None:
    demands = [demand("actor"), demand("rollout"), demand("reference")]
    host_set = search(demands, cluster(8, 8)).inputs.host_set(["actor"])
    train = GRPO.tasks[-1]

    def read(*pools: tuple[tuple[str, ...], int]) -> float:
        return reading_seconds(
            GRPO, train, host_set, tuple(roles for roles, _ in pools), tuple(size for _, size in pools)
        )

    alone = read((("actor", "reference", "rollout"), 1))
    one_host = read((("actor", "reference", "rollout"), 8))
    two_hosts = read((("actor", "reference", "rollout"), 16))
    apart = read((("rollout",), 8), (("actor", "reference"), 8))
    assert alone == 0 < one_host
    assert two_hosts < apart
    assert apart > 8 * GIB / 1.5e9


def test_a_task_on_the_hosts_of_its_samples_fetches_none_of_them() -> None:
    """8 GiB on each of 2 hosts go into the store and out of it, at 3 GB/s; to other hosts also over TCP."""
    host_set = search([demand("actor"), demand("rollout"), demand("reference")], cluster(8, 8)).inputs.host_set(
        ["actor"]
    )
    judge = replace(task("judge", "rollout", "host", "write"), role=None)
    graph = Workload(tasks=(*GRPO.tasks, judge), edges=(edge("write", "rollout", 16, "judge"),))
    pools, sizes = (("rollout",), ("actor", "reference")), (16, 16)

    def read(where: str | None) -> float:
        return reading_seconds(graph, replace(judge, hosts_of=where), host_set, pools, sizes)

    assert read("rollout") == pytest.approx(2 * 8 * GIB / 3e9, abs=0.01)
    assert read("actor") > read("rollout") + 8 * GIB / 1.5e9 - 0.01
    assert read(None) > read("actor")


@pytest.mark.slow
def test_the_plan_tells_and_the_hosts_memory_counts_it() -> None:
    demands = [demand("actor", SEVEN_B), demand("reference", SEVEN_B), demand("rollout", SEVEN_B)]
    given = workload(demands, longest=4096, samples=1024)

    def data(gib: float) -> tuple[float, float, float]:
        edges = (edge("rollout", "rollout", gib, "reference", "actor"), edge("reference", "reference", gib, "actor"))
        found = Search(demands, replace(given, edges=edges), cluster(8, 8), {})
        best = found.best()
        assert best is not None
        prediction = predict(found.inputs, best)
        return (
            sum(prediction.data.store_peak_gib.values()),
            sum(prediction.host_gib.values()),
            prediction.step_seconds,
        )

    none, some = data(0), data(64)
    assert none[0] == 0
    assert some[0] == pytest.approx(128)
    # Each is with who made it and in the store, and with each of its readers.
    assert some[1] - none[1] == pytest.approx(2 * 128 + 64 + 128, rel=0.01)
    assert some[2] > none[2]
