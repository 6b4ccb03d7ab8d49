"""Services of Ray that do not answer are given up after their time, and not before."""

from types import SimpleNamespace

import pytest

from rlflow.runtime.ray.cluster import services
from rlflow.runtime.ray.cluster.binding import LiveHost
from rlflow.runtime.ray.cluster.services import Outage, RayServices

HOST = LiveHost(
    node_id="node-1",
    name="host-0",
    hostname="a.example",
    address="10.0.0.1",
    port=7000,
    store_bytes=10**9,
    gpus=8,
    free_gpus=8,
    alive=True,
)


class World:
    """A cluster with a single host, and a clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, control: str = "127.0.0.1:6379") -> None:
        self.now = 100.0
        self.alive: dict[str, bool] | None = {"node-1": True}
        self.host_listens = self.control_listens = True
        self.seconds_per_question = 0.0
        context = SimpleNamespace(gcs_address=control)
        monkeypatch.setattr(services, "import_ray", lambda: SimpleNamespace(get_runtime_context=lambda: context))
        monkeypatch.setattr(services, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(services, "alive_hosts", self._ask)
        reachable = {control: lambda: self.control_listens, "10.0.0.1:7000": lambda: self.host_listens}
        monkeypatch.setattr(services, "is_reachable", lambda address: reachable[address]())
        self.services = RayServices({"planned": HOST})

    def _ask(self) -> dict[str, bool] | None:
        self.now += self.seconds_per_question
        return self.alive

    def outage_after(self, seconds: float) -> Outage:
        """Return the outage so many seconds after a first look."""
        self.services.outage()
        self.now += seconds
        return self.services.outage()


@pytest.mark.parametrize(
    ("control", "listens", "limit"),
    [
        ("127.0.0.1:6379", False, 4),
        ("127.0.0.1:6379", True, 20),
        ("10.0.0.9:6379", False, 45),
        ("10.0.0.9:6379", True, 45),
    ],
    ids=["private, dead", "private, silent", "shared, dead", "shared, silent"],
)
def test_a_silent_control_service_has_longer_if_it_may_come_back(
    control: str, listens: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, control)
    world.alive, world.control_listens = None, listens
    assert world.outage_after(limit) == Outage()
    world.now += 1
    said = f"Ray's control service (GCS) at {control} has not answered for {limit + 1} s"
    assert world.services.outage() == Outage(control=said)


def test_time_in_which_the_run_itself_had_no_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.alive = None
    assert world.outage_after(1.0) == Outage()
    world.seconds_per_question = 30.0
    assert world.services.outage() == Outage()


def test_an_answer_begins_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.alive = None
    assert world.outage_after(20.0) == Outage()
    world.alive = {"node-1": True}
    assert world.outage_after(1.0) == Outage()
    world.alive = None
    assert world.outage_after(20.0) == Outage()


def test_a_host_that_nothing_listens_on_is_lost_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.host_listens = False
    assert world.outage_after(2.0) == Outage()
    world.now += 1
    assert world.services.outage() == Outage(hosts={"node-1": "host-0 (10.0.0.1:7000) has not answered for 3 s"})
    assert world.services.lost_hosts() == ["planned"]


@pytest.mark.parametrize("alive", [{"node-1": False}, {}])
def test_a_host_that_ray_has_given_up_is_lost_at_once(alive: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.alive = alive
    assert world.services.outage() == Outage(hosts={"node-1": "Ray has given up host-0 (10.0.0.1)"})
