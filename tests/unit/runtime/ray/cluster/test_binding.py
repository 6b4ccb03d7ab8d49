"""The match between a plan's hosts and Ray's, without Ray."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest

import rlflow
from rlflow.errors import PlacementError
from rlflow.recipe.compose import load_cluster
from rlflow.resources.cluster import Host
from rlflow.resources.layout import Bundle
from rlflow.runtime.ray.cluster.binding import (
    BoundBundle,
    BoundPlan,
    LiveHost,
    check_bound,
    check_free,
    check_kinds,
    check_stores,
    match_hosts,
    placement_record,
    spare_bundles,
    wanted_bundles,
    wanted_gpus,
)
from tests.conftest import CONFIG_DIR
from tests.helpers import load


def live(name: str, gpus: int = 8, free: int | None = None, *, alive: bool = True, simulated: bool = False) -> LiveHost:
    return LiveHost(
        node_id=f"id of {name}",
        name=name,
        hostname=f"{name}.example.org",
        address=f"10.0.0.{len(name)}",
        port=1,
        store_bytes=10**9,
        gpus=gpus,
        free_gpus=gpus if free is None else free,
        alive=alive,
        simulated=simulated,
    )


def hosts(*names: str, gpus: int = 8, free: tuple[int, ...] | None = None) -> list[Host]:
    return [Host(name=name, gpus=gpus, gpu="h100", free=free) for name in names]


def of_shape(count: int) -> list[Host]:
    return hosts(*(f"host-{index}" for index in range(count)))


def chosen(planned: Sequence[Host], wanted: dict[str, int], there: Sequence[LiveHost]) -> dict[str, str]:
    return {name: host.name for name, host in match_hosts(planned, wanted, there).items()}


def test_each_gpu_is_wanted_once_in_the_order_of_the_plan() -> None:
    overrides = ["recipe=fake", "actor.gpus=3", "rollout.colocate=[]", "rollout.gpus=1"]
    plan = rlflow.compile(load("recipe=fake", *(f"roles.{o}" for o in overrides[1:]), config_dir=CONFIG_DIR), "2x2@cpu")
    wanted = wanted_bundles(plan)
    assert len(set(wanted)) == len(wanted)
    assert set(wanted) == {bundle for role in plan.roles.values() for bundle in role.bundles}
    assert list(wanted) == sorted(wanted, key=lambda bundle: (bundle.host, bundle.gpu))
    assert sum(wanted_gpus(wanted).values()) == len(wanted)


class TestMatchHosts:
    def test_names_of_a_shape_mean_any_host_in_their_order(self) -> None:
        there = [live("gpu10"), live("gpu2"), live("cpu", gpus=0)]
        assert chosen(of_shape(2), {"host-0": 8, "host-1": 8}, there) == {"host-0": "gpu2", "host-1": "gpu10"}

    def test_a_host_is_bound_by_its_name(self) -> None:
        there = [live("host-1"), live("host-0"), live("a")]
        assert chosen(of_shape(2), {"host-0": 8, "host-1": 8}, there) == {"host-0": "host-0", "host-1": "host-1"}

    @pytest.mark.parametrize("name", ["b", "b.example.org", "10.0.0.1", "id of b"])
    def test_by_name_host_name_address_or_id(self, name: str) -> None:
        assert chosen(hosts(name), {name: 8}, [live("b"), live("other")]) == {name: "b"}

    def test_a_host_is_bound_only_once(self) -> None:
        with pytest.raises(PlacementError, match=r"Ray has none for '10\.0\.0\.1'"):
            match_hosts(hosts("b", "10.0.0.1"), {"b": 4, "10.0.0.1": 4}, [live("b")])

    def test_uneven_hosts_find_the_way_there_is(self) -> None:
        there = [live("a", gpus=8), live("b", gpus=4), live("c", gpus=6)]
        wanted = {"host-0": 4, "host-1": 6, "host-2": 8}
        assert chosen(of_shape(3), wanted, there) == {"host-0": "b", "host-1": "c", "host-2": "a"}

    def test_hosts_with_gpus_free_come_first(self) -> None:
        assert chosen(of_shape(1), {"host-0": 4}, [live("a", free=2), live("b")]) == {"host-0": "b"}

    def test_a_host_with_gpus_in_use_is_still_chosen(self) -> None:
        assert chosen(of_shape(1), {"host-0": 4}, [live("a", free=2)]) == {"host-0": "a"}

    def test_a_dead_host_is_none(self) -> None:
        with pytest.raises(PlacementError, match=r"the plan uses 2 hosts, and Ray has none for 'host-1' \(8 GPUs\)"):
            match_hosts(of_shape(2), {"host-0": 8, "host-1": 8}, [live("a"), live("b", alive=False)])

    def test_no_gpus_at_all(self) -> None:
        with pytest.raises(PlacementError, match="and Ray has none for 'host-0'"):
            match_hosts(of_shape(1), {"host-0": 8}, [live("a", gpus=0)])

    def test_a_plan_for_other_hosts(self) -> None:
        with pytest.raises(PlacementError) as raised:
            match_hosts(hosts("x", "y", "b"), {"x": 8, "y": 4, "b": 8}, [live("a"), live("b")])
        assert str(raised.value) == (
            "cluster: the plan uses 3 hosts, and Ray has none for 'x' (8 GPUs), 'y' (4 GPUs).\n"
            "  Known: a (8 GPUs), b (8 GPUs).\n"
            "  Fix: plan for the live hosts (cluster=auto), or start Ray on the missing ones."
        )

    def test_a_named_host_with_fewer_gpus_than_planned(self) -> None:
        with pytest.raises(PlacementError, match="the plan uses 8 GPUs of host 'a', and Ray has 4 on it"):
            match_hosts(hosts("a"), {"a": 8}, [live("a", gpus=4), live("b")])

    def test_a_shape_on_hosts_that_are_so_called_and_smaller(self) -> None:
        there = [live("host-0", gpus=4), live("host-1", gpus=8)]
        assert chosen(of_shape(1), {"host-0": 8}, there) == {"host-0": "host-1"}


class TestCheckFree:
    def test_gpus_in_use_and_their_users(self) -> None:
        there = {"host-0": live("a", free=3), "host-1": live("b", free=8)}
        with pytest.raises(PlacementError) as raised:
            check_free({"host-0": 8, "host-1": 8}, there, {"id of a": ["5 by actor 'Other' of job 07000000"]})
        assert raised.value.fact == (
            "the plan uses 8 GPUs of 'a' and 3 are free (taken: 5 by actor 'Other' of job 07000000)"
        )

    def test_enough(self) -> None:
        check_free({"host-0": 8}, {"host-0": live("a")}, {})

    def test_many_hosts_are_not_all_listed(self) -> None:
        there = {str(index): live(str(index), free=0) for index in range(5)}
        with pytest.raises(PlacementError, match=r"0 are free; and 2 more"):
            check_free(dict.fromkeys(there, 1), there, {})


class TestCheckBound:
    wanted = (Bundle("host-0", 0), Bundle("host-0", 1), Bundle("host-1", 0))
    there = {"host-0": live("a"), "host-1": live("b")}

    def bound(self, *places: tuple[str, str]) -> list[BoundBundle]:
        return [BoundBundle(f"id of {name}", gpu) for name, gpu in places]

    def test_a_bundle_is_where_its_number_is(self) -> None:
        told = self.bound(("a", "1"), ("a", "0"), ("b", "0"))
        indices = check_bound(of_shape(2), self.wanted, self.wanted, self.there, told)
        assert indices == {self.wanted[0]: 1, self.wanted[1]: 0, self.wanted[2]: 2}

    def test_gpu_numbers_are_mapped_in_order(self) -> None:
        told = self.bound(("a", "10"), ("a", "9"), ("b", "GPU-7f"))
        indices = check_bound(of_shape(2), self.wanted, self.wanted, self.there, told)
        assert indices == {self.wanted[0]: 1, self.wanted[1]: 0, self.wanted[2]: 2}

    def test_a_number_that_is_there_keeps_its_bundle(self) -> None:
        indices = check_bound(
            of_shape(2), self.wanted, self.wanted, self.there, self.bound(("a", "1"), ("a", "5"), ("b", "0"))
        )
        assert indices == {self.wanted[0]: 1, self.wanted[1]: 0, self.wanted[2]: 2}

    def test_another_host(self) -> None:
        told = self.bound(("a", "0"), ("b", "1"), ("b", "0"))
        with pytest.raises(PlacementError, match="bound other GPUs than planned: GPU 1 of 'host-0' is on 'host-1'"):
            check_bound(of_shape(2), self.wanted, self.wanted, self.there, told)

    def test_one_gpu_twice(self) -> None:
        told = self.bound(("a", "0"), ("a", "0"), ("b", "0"))
        with pytest.raises(PlacementError, match="GPU 0 of 'host-0' is given twice"):
            check_bound(of_shape(2), self.wanted, self.wanted, self.there, told)

    def test_a_gpu_that_the_plan_leaves_alone(self) -> None:
        planned = hosts("host-0", "host-1", free=(0, 1))
        told = self.bound(("a", "0"), ("a", "2"), ("b", "1"))
        with pytest.raises(PlacementError, match="Ray has given GPU 2 of 'a', which the plan may not use"):
            check_bound(planned, self.wanted, self.wanted, self.there, told)


class TestCheckKinds:
    bundles = (Bundle("host-0", 0), Bundle("host-1", 0))

    def check(self, *names: str | None, cluster: str = "2x8@h200", simulated: bool = False) -> None:
        there = {"host-0": live("a", simulated=simulated), "host-1": live("b", simulated=simulated)}
        told = {bundle: BoundBundle("", "3", name) for bundle, name in zip(self.bundles, names, strict=True)}
        check_kinds(load_cluster(cluster), there, told)

    def test_another_kind(self) -> None:
        with pytest.raises(PlacementError) as raised:
            self.check("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
        assert raised.value.fact == (
            "the plan is for GPUs of the kind h200 (NVIDIA H200), and GPU 3 of 'b' is NVIDIA A100-SXM4-80GB"
        )

    def test_each_host_has_its_own(self) -> None:
        self.check("NVIDIA H200", "NVIDIA A10G", cluster="1x8@h200+1x8@a10g")

    def test_kinds_that_are_not_known(self) -> None:
        self.check("NVIDIA H200", None)
        self.check("AMD", "AMD", cluster="2x8@mi300x")
        self.check("NVIDIA A10G", "NVIDIA A10G", simulated=True)


class TestSpareBundles:
    wanted = (Bundle("host-0", 0), Bundle("host-0", 3), Bundle("host-1", 0), Bundle("host-1", 1))

    def test_unused_gpus_below_the_last_planned_one_are_reserved(self) -> None:
        there = {"host-0": live("a"), "host-1": live("b")}
        spare = spare_bundles(of_shape(2), self.wanted, there)
        assert spare == [Bundle("host-0", 1), Bundle("host-0", 2)]
        reserved = (*self.wanted, *spare)
        told = [BoundBundle(f"id of {name}", gpu) for name, gpu in zip("aabbaa", "010123", strict=True)]
        indices = check_bound(of_shape(2), self.wanted, reserved, there, told)
        assert {bundle: told[index].gpu_id for bundle, index in indices.items()} == {
            bundle: str(bundle.gpu) for bundle in self.wanted
        }

    def test_not_where_others_have_them(self) -> None:
        there = {"host-0": live("a", free=3), "host-1": live("b")}
        assert spare_bundles(of_shape(2), self.wanted, there) == []

    def test_gpus_outside_the_plan_are_left_out(self) -> None:
        planned = [*hosts("host-0", free=(0, 2, 3)), *hosts("host-1")]
        there = {"host-0": live("a"), "host-1": live("b")}
        assert spare_bundles(planned, self.wanted, there) == [Bundle("host-0", 2)]


def test_the_record_has_planned_beside_bound() -> None:
    plan = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "1x1@cpu")
    (bundle,) = wanted_bundles(plan)
    host = live("a", simulated=True)
    placed = BoundPlan(group=None, bundle_indices={bundle: 0}, gpu_ids={bundle: "5"}, hosts={bundle.host: host})
    record = placement_record(plan, placed)
    assert record["simulated"] is True
    assert record["hosts"] == {"host-0": {"name": "a", "node_id": "id of a", "address": "10.0.0.1", "gpus": 8}}
    both = {"planned": {"host": "host-0", "gpu": 0}, "bound": {"host": "a", "gpu": "5"}}
    assert record["roles"]["actor"] == [[both]]


SMALLER = "smaller batch_size, group_size or max_tokens"


@pytest.mark.parametrize(
    ("simulated", "fix"),
    [(False, "start Ray there with --object-store-memory={} or more, or " + SMALLER), (True, SMALLER)],
)
def test_a_store_needs_twice_the_predicted_peak(simulated: bool, fix: str) -> None:
    plan = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "1x1@cpu")
    needed = ceil(2 * plan.prediction.data.store_peak_gib["host-0"] * 2**30)
    host = live("ip-10-0-0-1", simulated=simulated)
    check_stores(plan, {"host-0": replace(host, store_bytes=needed)})
    with pytest.raises(PlacementError, match=r"^data\.batch_size: a step needs .* of 'ip-10-0-0-1' at once") as raised:
        check_stores(plan, {"host-0": replace(host, store_bytes=needed - 2)})
    assert raised.value.notes["Fix"] == fix.format(needed)
