"""Whole steps on simulated hosts: what passes through the controller, and what lies in the stores."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rlflow
from benchmarks.traffic import counted
from rlflow.batch import Logprobs, Packed, Sequences
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import EngineError, PlacementError, RecipeError
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.objects.slices import SharedBatch
from rlflow.runtime.ray.cluster.hosts import host_names
from rlflow.runtime.ray.engine_set import RayEngines
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training
from tests.conftest import CONFIG_DIR
from tests.helpers import load

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PROMPTS, GROUP_SIZE = 64, 8


# Nodes of many kinds that read tokens.
READING = (
    f"graph.rewards.function='{__name__}:lengths'",
    "graph.old_logprobs={node: logprobs, role: actor}",
    "graph.kl={node: kl_divergence, kl_estimator: k3}",
    "graph.penalized={node: kl_penalty, kl_coef: 0.1}",
    "graph.advantages={node: token_advantage, kl_coef: 0.1, rewards: penalized}",
    "graph.later={node: logprobs, role: actor}",
    "graph.update={node: gspo_update, correction: {level: sequence, max_ratio: 1.5}, aggregation: sequence}",
    "graph.update={old_logprobs: later, num_minibatches: 4}",
)


def plan_of(*overrides: str, trainers: int = 2, cluster: str = "2x1@cpu") -> Plan:
    """Return a plan with two engines that generate, and so many for training and for the reference."""
    pins = ["roles.rollout.gpus=2", *(f"roles.{role}.gpus={trainers}" for role in ("actor", "reference"))]
    sizes = [f"data.batch_size={PROMPTS}", f"graph.rollouts.group_size={GROUP_SIZE}"]
    return rlflow.compile(load("recipe=fake", *pins, *sizes, *overrides, config_dir=CONFIG_DIR), cluster)


def lengths(texts: Any, rows: Any) -> list[float]:
    return [float(len(text)) for text in texts]


def fails(texts: Any, rows: Any) -> list[float]:
    raise ValueError(f"{len(texts)} texts, of which {type(texts[0]).__name__}")


@pytest.fixture(scope="module", autouse=True)
def workers_of_this_module(hosts: None) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Started:
    """The engines of a plan, with its training data in this process and on a host."""

    plan: Plan
    engines: RayEngines
    local_data: DataSource
    data: Any

    @property
    def training(self) -> Training:
        return Training.of(self.plan, self.engines, self.data)


@pytest.fixture(scope="class")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    plan = plan_of(*READING)
    models, options = models_in_use(plan.recipe), plan.recipe.data
    tokenizer = load_tokenizer("policy", models["policy"])
    data = open_training_data(options, tokenizer, load_rows(options, "split"), 0)
    with RayRuntime().start(plan, models, tmp_path_factory.mktemp("run")) as engines:
        assert isinstance(engines, RayEngines)
        yield Started(plan, engines, data, engines.place_with_tokens(data))


class TestSteps:
    def test_nodes_that_read_tokens_compute_the_same_as_in_one_process(
        self, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They run on the hosts where the tokens are, and no token comes to the controller."""
        plan = started.plan
        with LocalRuntime().start(plan, models_in_use(plan.recipe), tmp_path) as local:
            expected = train_step(Training.of(plan, local, started.local_data), 0)
        read: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr("rlflow.runtime.objects.store.fetch", read.append)
            metrics = train_step(started.training, 0)
        assert read == []
        assert metrics["store/advantages_bytes"] == 4 * metrics["tokens"]
        assert metrics["store/later_bytes"] == pytest.approx(3 * metrics["tokens"], rel=0.1)
        measured = {name: value for name, value in expected.items() if name.startswith(("kl/", "penalized/"))}
        assert {name: metrics[name] for name in measured} == pytest.approx(measured)
        assert expected["penalized/mean"] > 1

    def test_the_messages_of_a_step_are_short(self, started: Started) -> None:
        train_step(started.training, 0)
        with counted() as traffic:
            train_step(started.training, 1)
        samples = PROMPTS * GROUP_SIZE
        assert 0 < traffic.nbytes <= 65536 + 100 * samples

    def test_nothing_is_left_in_the_stores_after_a_step(self, started: Started) -> None:
        metrics = train_step(started.training, 2)
        assert set(started.engines.store_usage.used.values()) == {0}
        # The ids and logprobs of the rollouts are four bytes a token each, and their texts are there too.
        assert metrics["store/rollouts_bytes"] > 8 * metrics["rollouts/length_mean"] * PROMPTS * GROUP_SIZE
        assert metrics["store/reference_bytes"] == 4 * metrics["tokens"]

    def test_a_block_that_is_lost(self, started: Started) -> None:
        prompts = started.data.prompts(0)
        block = prompts.ids.blocks[0]
        block.count += 1
        lost = Sequences(keys=prompts.keys, prompt_ids=prompts.ids, response_ids=prompts.ids)
        with pytest.raises(EngineError, match=r"object store: expected a block of \d+ values of int32, got int32 of"):
            started.engines["reference"].logprobs(lost, 1.0)


def begins_low(texts: Any, rows: Any) -> list[float]:
    return [float(text[:1] < "3") for text in texts]


@pytest.mark.soak
def test_rounds_are_the_same_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(
        *("data.batch_size=8", "graph.rollouts.group_size=2", "+graph.sampling={node: dynamic_sampling}"),
        f"graph.rewards.function='{__name__}:begins_low'",
    )
    models, options = models_in_use(plan.recipe), plan.recipe.data
    tokenizer = load_tokenizer("policy", models["policy"])
    data = open_training_data(options, tokenizer, load_rows(options, "split"), 0)
    steps = range(3)
    with LocalRuntime().start(plan, models, tmp_path) as engines:
        training = Training.of(plan, engines, data)
        expected = [train_step(training, step) for step in steps]
    read: list[Any] = []
    with RayRuntime().start(plan, models, tmp_path) as engines, monkeypatch.context() as patched:
        assert isinstance(engines, RayEngines)
        patched.setattr("rlflow.runtime.objects.store.fetch", read.append)
        training = Training.of(plan, engines, engines.place_with_tokens(data))
        found = [train_step(training, step) for step in steps]
        assert set(engines.store_usage.used.values()) == {0}
    assert read == []
    assert max(step["sampling/rounds"] for step in expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        names = [name for name in theirs if name.startswith(("sampling/", "rewards/", "rollouts/"))]
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names})


class Columns:
    """Makes 4096 rows of 4 KiB, and reads what it is given."""

    def make(self) -> Logprobs:
        values = np.arange(4096 * 1024, dtype=np.float32)
        return Logprobs(values=Packed(values, np.arange(4097) * 1024))

    def read(self, given: Logprobs) -> float:
        parts = (given.take(rows) for rows in np.array_split(np.arange(len(given)), 4))
        return sum(float(part.values.values[::1024].astype(np.float64).sum()) for part in parts)


def test_between_hosts_goes_what_is_read_there() -> None:
    """Three readers on another host have a quarter of a batch of 16 MiB each, and two of them the same one."""
    nodes = [host for host, _ in sorted(host_names({}).items(), key=lambda item: item[1])]
    actors = []
    for host in (nodes[0], nodes[1], nodes[1], nodes[1]):
        where = NodeAffinitySchedulingStrategy(host, soft=False)
        actors.append(ray.remote(ObjectProcess).options(num_cpus=0, scheduling_strategy=where).remote())
    ray.get([actor.load_object.remote(ray.cloudpickle.dumps(Columns())) for actor in actors])

    whole = SharedBatch(ray.get(actors[0].call_and_put.remote(True, "make")))
    parts = [np.arange(0, 4096, 4), np.arange(1, 4096, 4), np.arange(1, 4096, 4)]
    before = created(nodes[1])
    messages = [whole.slice(rows).to_message() for rows in parts]
    sums = [actor.call_and_put.remote(True, "read", each) for actor, each in zip(actors[1:], messages, strict=True)]
    for rows, told_sum in zip(parts, ray.get(sums), strict=True):
        assert told_sum == pytest.approx(float((rows * 1024).sum()))
    read = 2 * 1024 * 4096
    assert created(nodes[1]) - before <= 1.1 * read


def created(host: str) -> int:
    """Return the bytes that have come into the store of a host since it started."""
    (node,) = (each for each in ray.nodes() if each["NodeID"] == host)
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.cumulative_created_bytes)


def test_a_plan_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rlflow.runtime.ray.cluster.binding._BATCH_SHARE", 1e-7)
    plan, entered = plan_of(), False
    with (
        pytest.raises(PlacementError, match=r"data\.batch_size: a step needs 0\.0 MiB"),
        RayRuntime().start(plan, models_in_use(plan.recipe), tmp_path),
    ):
        entered = True
    assert not entered


@pytest.mark.soak
def test_a_reward_that_fails_is_the_recipes(tmp_path: Path) -> None:
    """A reward function gets texts and rows in the same form as in one process."""
    plan = plan_of(f"graph.rewards.function='{__name__}:fails'", "evaluation=null")
    said = rf"graph\.rewards\.function: '{__name__}:fails' failed \(ValueError: 1 texts, of which str\)"
    with pytest.raises(RecipeError, match=said):
        run(plan, tmp_path, RayRuntime())


def test_the_report_has_what_was_predicted_beside_what_was_measured(tmp_path: Path) -> None:
    settings = ("steps=1", "evaluation=null", "expect.response_tokens=2.5")
    report = run(plan_of(*settings, trainers=1, cluster="1x2@cpu+1x1@cpu"), tmp_path, RayRuntime())
    assert report.store.keys() == {"prompts", "rollouts", "reference", "peak of host-0", "peak of host-1"}
    for name in ("rollouts", "reference"):
        figures = report.store[name]
        assert figures["measured"] == pytest.approx(figures["predicted"], rel=0.3), name
