"""The contract of every runtime, wherever its workers live."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.engines.base import CAPABILITIES, Sampling
from rlflow.errors import PlacementError, RecipeError
from rlflow.recipe.options import RunOptions
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Runtime
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load, metrics_of, prompts
from tests.trace_rules import checked_events, process_names

SHARED_PROCESSES = "hosts"

RUNTIMES: dict[str, type[Runtime]] = {"local": LocalRuntime, "ray": RayRuntime}
# Clusters, and where on them the roles of conf/recipe/fake are.
PLACEMENTS = {
    "all on the same GPUs": ("2x1@cpu", "actor.gpus=2", "rollout.colocate=[actor,reference]"),
    "rollout apart": ("2x2@cpu", "actor.colocate=[reference]", "rollout.colocate=[]"),
    "each apart": ("1x2@cpu+1x1@cpu", "actor.colocate=[]", "rollout.colocate=[]", "reference.colocate=[]"),
    "uneven hosts": ("1x3@cpu+1x2@cpu", "rollout.tensor_parallel_size=2", "rollout.gpus=4", "rollout.colocate=[]"),
}


def plan_of(cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(load("recipe=fake", *overrides, config_dir=CONFIG_DIR), cluster)


def placed(kind: str) -> Plan:
    """Return a plan with roles on several GPUs."""
    cluster, *pins = PLACEMENTS[kind]
    plan = plan_of(cluster, *(f"roles.{pin}" for pin in pins))
    assert len({bundle for placement in plan.roles.values() for bundle in placement.bundles}) > 1
    return plan


def check_trace(folder: Path, plan: Plan) -> None:
    """Check that a trace has the calls of every worker, inside the nodes that made them."""
    events = checked_events(folder / "trace.json")
    names = {pid: name.partition(" ")[0] for pid, name in process_names(events).items()}
    calls = {
        (names[event["pid"]], event["name"], event["args"]["method"])
        for event in events
        if "method" in event.get("args", {})
    }
    expected = {
        "actor": ("update", "update"),
        "rollout": ("copy", "load_weights"),
        "reference": ("reference", "logprobs"),
    }
    for role, call in expected.items():
        for rank in range(len(plan.roles[role].workers)):
            assert (f"{role}/{rank}", *call) in calls
    nodes = {node.name for node in plan.graph.nodes}
    assert {name for _, name, _ in calls} <= {*nodes, "copy", "evaluation"}


def check_profiles(folder: Path, plan: Plan, steps: set[int]) -> None:
    """Check that each worker has written what torch did in each of the steps; a single process writes one file."""
    workers = [(role, rank) for role, each in plan.roles.items() for rank in range(len(each.workers))]
    writers = workers if len({bundle for each in plan.roles.values() for bundle in each.bundles}) > 1 else workers[:1]
    expected = {f"step-{step}/{role}-{rank}" for step in steps for role, rank in writers}
    files = list(folder.rglob("*.json.gz"))
    assert {str(path.relative_to(folder)).removesuffix(".pt.trace.json.gz") for path in files} == expected
    for path in folder.rglob("actor-*"):  # the other engines are without torch
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event["name"].startswith("aten::") for event in events)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def runtime(request: pytest.FixtureRequest) -> type[Runtime]:
    if request.param == "ray":
        request.getfixturevalue("hosts")
    return RUNTIMES[request.param]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the metrics of a run in this process that nothing stops."""
    folder = tmp_path_factory.mktemp("expected")
    run(plan_of("local"), folder, LocalRuntime(), [MetricsWriter()])
    return metrics_of(folder)


class TestRuntime:
    def test_every_role_has_an_engine_that_can_what_is_asked(self, runtime: type[Runtime], tmp_path: Path) -> None:
        plan = plan_of("local")
        runtime().check(plan)
        with runtime().start(plan, models_in_use(plan.recipe), tmp_path) as engines:
            assert engines.keys() == plan.roles.keys()
            for role, engine in engines.items():
                for capability in plan.graph.capabilities(role):
                    assert isinstance(engine, CAPABILITIES[capability])
            engines["rollout"].load_weights(engines["actor"].weights(), 2)
            out = engines["rollout"].generate(prompts(), Sampling(max_tokens=2, group_size=2))
            assert out.keys.tolist() == [[0, prompt, sample] for prompt in range(3) for sample in range(2)]
            assert set(out.versions.values.tolist()) == {2}

    def test_a_run_is_the_same_and_goes_on_where_it_stopped(
        self, runtime: type[Runtime], expected: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        """A run on Ray resumes on other hosts."""
        stopped = run(plan_of("local"), tmp_path / "run", runtime(), [MetricsWriter()], stop=lambda: True)
        assert stopped.status == "stopped"
        plan = placed("uneven hosts") if runtime is RayRuntime else plan_of("local")
        report = run(
            plan, tmp_path / "run", runtime(), [MetricsWriter()], RunOptions(trace=True, profile=(2, 5)), resume=True
        )
        assert report.status == "finished"
        check_trace(tmp_path / "run", plan)
        check_profiles(tmp_path / "run" / "profiles", plan, {2, 5})
        assert Path(report.models["actor"]).is_dir()
        assert metrics_of(tmp_path / "run") == expected

    @pytest.mark.slow
    def test_steps_that_ask_for_more_prompts(
        self, runtime: type[Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No tokens come to the process that runs the graph."""
        more = ("+graph.sampling={node: dynamic_sampling}", f"graph.rewards.function='{__name__}:begins_low'")
        plan = plan_of("local", *more, "evaluation=null")
        run(plan, tmp_path / "expected", LocalRuntime(), [MetricsWriter()])
        read: list[Any] = []
        monkeypatch.setattr("rlflow.runtime.objects.store.fetch", read.append)
        run(plan, tmp_path / "run", runtime(), [MetricsWriter()])
        assert read == []
        assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "expected")
        assert {line["sampling/rounds"] for line in metrics_of(tmp_path / "run")} != {1}

    def test_a_model_that_is_not_there(self, runtime: type[Runtime], tmp_path: Path) -> None:
        source = ("models.policy.random_weights=false", "models.policy.characters=null", "models.policy.path=/nowhere")
        plan = plan_of("local", *source, "roles.reference.engine=transformers")
        entered = False
        with (
            pytest.raises(RecipeError, match=r"models\.policy\.path: '/nowhere' is not a folder"),
            runtime().start(plan, models_in_use(plan.recipe), tmp_path),
        ):
            entered = True
        assert not entered


def begins_low(texts: Sequence[str], rows: Any) -> list[float]:
    """Reward a low first digit, in which the responses to a prompt mostly differ."""
    return [float(text[:1] < "3") for text in texts]


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_run_does_not_depend_on_where_roles_are(
    kind: str, expected: list[dict[str, Any]], tmp_path: Path, hosts: None
) -> None:
    run(placed(kind), tmp_path / "ray", RayRuntime(), [MetricsWriter()])
    assert metrics_of(tmp_path / "ray") == expected


@pytest.mark.slow
def test_steps_that_are_generated_in_one_turn(tmp_path: Path) -> None:
    """Three steps have the weights of the first; tests/integration/test_turns.py has such steps on Ray.

    The run stops, and resumes, between the second and the third.
    """
    plan = plan_of("local", "overlap.max_staleness=2")
    assert plan.takes_turns
    run(plan, tmp_path / "expected", LocalRuntime(), [MetricsWriter()])
    stops = iter([False, False, True])
    run(plan, tmp_path / "run", LocalRuntime(), [MetricsWriter()], stop=lambda: next(stops))
    run(plan, tmp_path / "run", LocalRuntime(), [MetricsWriter()], resume=True)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "expected")
    ages = [line["overlap/staleness_max"] for line in metrics_of(tmp_path / "run") if "overlap/staleness_max" in line]
    assert ages == [0, 1, 2, 0, 1, 2]


def test_the_local_runtime_has_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.runtime.local.gpus_of_this_machine", list)
    with pytest.raises(PlacementError, match="the plan is for 1x1@h100_80gb, and this machine has no GPU"):
        LocalRuntime().check(plan_of("1x1"))
