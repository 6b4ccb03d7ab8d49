"""Roles that share GPUs: who is awake, and that the others hold no memory that they do not need."""

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import rlflow
from rlflow.compiler.graph import Graph
from rlflow.compiler.plan import Plan
from rlflow.engines.base import Sleeps
from rlflow.engines.memory import TunableEngine
from rlflow.engines.registry import engine_kind
from rlflow.resources.layout import Bundle
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.protocols import Workers
from rlflow.runtime.ray.engine_set import RayEngines
from rlflow.runtime.ray.gpu_turns import GpuTurns, gpu_neighbors, sleeping_roles
from rlflow.runtime.training import sync_followers
from tests.helpers import load


@dataclass
class Spy:
    """The workers of a role: a stand-in that knows what a real one would hold on its GPUs."""

    role: str
    gpus: set[Bundle]
    log: list[str]
    concurrent = False
    beside: "list[Spy]" = field(default_factory=list)
    sleeper: bool = False
    receives_awake: bool = False
    cached: bool = True
    weights: str = "here"
    """The place of the weights: "here", "away" (in the host's memory) or "lost"."""
    rest: bool = True
    """True while gradients, the optimizer or the KV cache are on the GPU."""

    def __len__(self) -> int:
        return 1

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        getattr(self, method)(*arguments)
        self.log.append(f"{self.role} {method}" + "".join(f" {argument}" for argument in arguments if argument is True))
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def restart(self, ranks: Any) -> Any:
        raise AssertionError

    def dead_ranks(self) -> Any:
        raise AssertionError

    def release_memory(self) -> None:
        assert not self.sleeper
        self.cached = False

    def sleep(self, discard_weights: bool = False) -> None:
        assert self.sleeper
        self.cached = self.rest = False
        if self.weights == "here":
            self.weights = "lost" if discard_weights else "away"

    def wake(self, weights_only: bool = False) -> None:
        # The role that sends weights has them there while another wakes to take them.
        self._has_the_gpus(but_weights=weights_only)
        self.weights = "here" if self.weights == "away" else self.weights
        self.rest = not weights_only
        # Engines release first what is not wanted there.
        self.cached = self.cached and not weights_only

    def save(self, folder: Path) -> None:
        """Stand for any work."""
        self._has_the_gpus()
        assert (self.weights, self.rest) == ("here", True)
        self.cached = True

    def sync_weights(self, source: Workers, version: int) -> None:
        assert isinstance(source, Spy)
        assert source.weights == "here"
        self._has_the_gpus(but_weights=True)
        assert self.rest == (self.receives_awake or not self.sleeper)
        self.weights, self.cached = "here", True
        # The plan counts buffers that stay beside a role that is awake.
        source.cached = not self.receives_awake
        self.log.append(f"{source.role} to {self.role}")

    def _has_the_gpus(self, but_weights: bool = False) -> None:
        for other in self.beside:
            assert not other.cached, f"{self.role} begins while {other.role} holds what torch caches"
            if other.sleeper:
                assert not other.rest, f"{self.role} begins while {other.role} is awake"
                assert but_weights or other.weights != "here", f"{self.role} begins beside the weights of {other.role}"


@dataclass(frozen=True)
class Work:
    """An operation that lets its role work, whatever it gets."""

    unit = "batch"
    reads_tokens = can_stream = False

    def new_state(self) -> None:
        return None

    def run(self, engine: Any = None, **inputs: Any) -> None:
        if engine is not None:
            engine.save(Path("anywhere"))


@contextmanager
def spies(plan: Plan) -> Iterator[tuple[RayEngines, Mapping[str, Spy], list[str]]]:
    """Yield spies in place of the engines of a plan, started as start_engines does."""
    log: list[str] = []
    found = {role: Spy(role, set(placed.bundles), log) for role, placed in plan.roles.items()}
    for spy in found.values():
        layout = plan.roles[spy.role].layout
        turns = [other for other in found.values() if not plan.roles[other.role].layout.stays]
        spy.beside = [other for other in turns if other is not spy and spy in turns and other.gpus & spy.gpus]
        spy.sleeper, spy.receives_awake = bool(spy.beside) and layout.sleeps, layout.receives_awake
    workers: Any = found
    engines = RayEngines(plan, Path(), workers, Mock(), Mock(), Mock(), Mock())
    for role, spy in found.items():
        engines._turns.started(role)
        if spy.beside:
            engines._turns.release(role)
    yield engines, found, log


def working(graph: Graph) -> Graph:
    work: Any = Work()
    return replace(graph, nodes=tuple(replace(node, operation=work, inputs={}) for node in graph.nodes))


PLANS = [
    ("grpo_7b", "1x8", []),
    ("grpo_32b", "2x8", []),
    ("ppo_7b", "1x8", []),
    ("ppo_7b", "1x8@a100_40gb", []),
    ("grpo_lora_32b", "2x8", []),
    ("grpo_7b", "1x1@b200", ["roles.actor.engine=torch"]),
    ("grpo_7b", "1x8@b200", []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "cluster", "overrides"), PLANS)
def test_caches_are_released_at_every_hand_over(recipe: str, cluster: str, overrides: list[str]) -> None:
    plan = rlflow.compile(load(f"recipe={recipe}", *overrides), cluster)
    with spies(plan) as (engines, found, log):
        assert any(spy.beside for spy in found.values()), "nothing to see: no role shares its GPUs"
        graph = working(plan.graph)
        sync_followers(plan, engines, version=0)
        for step in range(1, 4):
            log.clear()
            engines["rollout"].save(Path("an evaluation"))
            GraphRunner(graph, engines).run(graph, {}, ends_step=True)
            sync_followers(plan, engines, version=step)
        # Every role beside another one releases memory in every step.
        given_up = {line.partition(" ")[0] for line in log if line.partition(" ")[2] in GIVE_UP}
        assert given_up >= {spy.role for spy in found.values() if spy.beside}
        discards = "rollout sleep True" in log
        assert discards == (plan.recipe.lora_of("rollout") is None and found["rollout"].sleeper)
        assert "rollout sleep" not in log or not discards


GIVE_UP = ("release_memory", "sleep", "sleep True")


def calls_of_a_step(recipe: str, cluster: str) -> Counter[str]:
    """Count the calls by which roles give up memory and take it again in a step, after the first."""
    plan = rlflow.compile(load(f"recipe={recipe}"), cluster)
    with spies(plan) as (engines, _, log):
        graph = working(plan.graph)
        sync_followers(plan, engines, version=0)
        for step in (1, 2):
            log.clear()
            GraphRunner(graph, engines).run(graph, {}, ends_step=True)
            sync_followers(plan, engines, version=step)
        return Counter(line for line in log if line.split()[1] in (*GIVE_UP, "wake"))


def test_roles_that_fit_side_by_side_give_up_nothing() -> None:
    assert calls_of_a_step("grpo_tiny_cluster", "1x1@h200") == {}


def test_roles_that_take_turns_give_up_memory_once_in_a_step() -> None:
    once = {"actor release_memory": 1, "reference release_memory": 1, "rollout sleep True": 1, "rollout wake": 1}
    assert calls_of_a_step("grpo_7b", "1x8@b200") == once


def test_where_buffers_do_not_fit_beside_the_engine_weights_come_first() -> None:
    """The role that sends gives up its memory before and after, and the engine wakes in two parts."""
    calls = calls_of_a_step("grpo_7b", "1x8")
    assert calls.pop("reference release_memory") == calls.pop("rollout sleep True") == 1
    assert calls == {"actor release_memory": 2, "rollout wake True": 1, "rollout wake": 1}


def test_which_roles_sleep_and_which_release_memory() -> None:
    log: list[str] = []
    gpus = {Bundle("host-0", 0)}
    roles = {
        name: Spy(name, gpus, log, sleeper=name in ("rollout", "critic")) for name in ("actor", "critic", "rollout")
    }
    for spy in roles.values():
        spy.beside = [other for other in roles.values() if other is not spy]
    beside = {name: [other for other in roles if other != name] for name in roles}
    turns = GpuTurns(roles, beside, {"rollout", "critic"}, {"rollout"})

    def told() -> list[str]:
        said = list(log)
        log.clear()
        return said

    for role in roles:
        turns.release(role)
    assert told() == ["actor release_memory", "critic sleep", "rollout sleep True"]
    turns.prepare_sender("actor")
    turns.prepare_receiver("rollout")
    assert told() == ["rollout wake True"]
    roles["rollout"].weights = "here"
    turns.weights_loaded("rollout")
    roles["actor"].cached = True  # of the copy
    turns.take("rollout")
    assert told() == ["actor release_memory", "rollout wake"]
    turns.take("rollout")
    assert told() == []
    # It may generate again before the next weight sync.
    turns.take("actor")
    assert told() == ["rollout sleep"]
    turns.take("rollout")
    assert told() == ["actor release_memory", "rollout wake"]
    turns.weights_expired("rollout")
    turns.take("critic")
    assert told() == ["rollout sleep True", "critic wake"]
    # The critic's state leaves the GPU before weights pass.
    turns.prepare_sender("critic")
    assert told() == ["critic wake True"]
    turns.take("critic")
    assert told() == ["critic wake"]
    # Lost workers have no memory to release. The roles beside them release theirs before new workers start.
    lost = ("critic", "actor")
    for name in lost:
        turns.stopped(name)
        roles[name].cached, roles[name].rest, roles[name].weights = False, False, "lost"
    turns.take("rollout")
    assert told() == ["rollout wake"]
    for name in lost:
        turns.make_room(name)
        turns.started(name)
        roles[name].cached, roles[name].rest, roles[name].weights = True, True, "here"
        turns.release(name)
    assert told() == ["rollout sleep True", "critic sleep", "actor release_memory"]


def test_on_cpus_roles_do_not_take_turns() -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny_cluster"), "2x1@cpu")
    assert not any(gpu_neighbors(plan).values())
    assert not sleeping_roles(plan)


@pytest.mark.parametrize("name", ["torch", "deepspeed", "transformers"])
def test_engines_release_their_memory(name: str) -> None:
    assert issubclass(engine_kind(name).engine, TunableEngine)


@pytest.mark.parametrize("name", ["vllm", "deepspeed"])
def test_engines_that_sleep(name: str) -> None:
    assert issubclass(engine_kind(name).engine, Sleeps)
