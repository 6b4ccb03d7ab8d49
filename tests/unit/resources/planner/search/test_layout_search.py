"""The best layout of a role for the memory that is left, against all of its layouts."""

from dataclasses import replace

import pytest

from rlflow.resources.demand import Demand
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.hosts import select_hosts
from rlflow.resources.planner.pools import Pool, PoolShape, RoleChoice, Shortage
from rlflow.resources.planner.search.degrees import PoolPolicy, base_layout
from rlflow.resources.planner.search.engine_layouts import EngineOption, engine_options
from rlflow.resources.planner.search.layout_search import LayoutSearch
from rlflow.resources.planner.search.model_layouts import MAX_MICRO_BATCH_TOKENS, model_options
from rlflow.resources.workload import Workload
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, workload

LONG = replace(SEVEN_B, max_position_embeddings=131072)
SEVENTY_B = replace(
    SEVEN_B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


def pool(gpus: int, *demands: Demand) -> Pool:
    hosts = [8] * (gpus // 8) + [gpus % 8] * (gpus % 8 > 0)
    return Pool(demands, PoolShape(((gpus, 1),), min(gpus, 8)), select_hosts(cluster(*hosts), (), {}))


def work_of(made: Pool, longest: int) -> Workload:
    return workload(made.demands, longest=longest)


def search_of(role: Demand, work: Workload, policy: PoolPolicy, made: Pool) -> LayoutSearch:
    base = base_layout(role, policy.state_of(role), made.shape)
    return LayoutSearch(role, work.of(role.role), base, made.shape, made.host_set)


def engines_of(role: Demand, work: Workload, made: Pool) -> list[EngineOption | Shortage]:
    base = base_layout(role, None, made.shape)
    return list(engine_options(role, work.of(role.role), base, made.shape, made.host_set))


def best_of_all(role: Demand, work: Workload, policy: PoolPolicy, made: Pool, available: float) -> RoleChoice | None:
    """Return the fastest of all options, with the error of times added where an update keeps all activations."""
    base = base_layout(role, policy.state_of(role), made.shape)
    options = engine_options if role.job == "serve" else model_options
    best: tuple[float, RoleChoice] | None = None
    for option in options(role, work.of(role.role), base, made.shape, made.host_set):
        enough = option.enough_gib if isinstance(option, EngineOption) else available
        choice = option if isinstance(option, Shortage) else option.choose(min(available, enough))
        if isinstance(choice, RoleChoice):
            layout, layers = choice.layout, role.architecture.num_hidden_layers if role.architecture else 1
            keeps = layout.kept_layers / layers if layout.gradient_checkpointing else float(choice.phase == "update")
            seconds = sum(choice.seconds.values()) * (1 + TIME_ERROR * keeps)
            if best is None or seconds < best[0]:
                best = seconds, choice
    return best[1] if best else None


@pytest.mark.parametrize("model", [SEVEN_B, SEVENTY_B])
@pytest.mark.parametrize("name", ["actor", "reference", "rollout"])
@pytest.mark.parametrize("gpus", [1, 3, 8, 16])
def test_no_option_that_is_left_out_is_the_best(model: Architecture, name: str, gpus: int) -> None:
    role = replace(demand(name), architecture=model)
    made = pool(gpus, role, demand("other"))
    work = work_of(made, 4096)
    policies = [PoolPolicy(zero_stage=2), PoolPolicy(sleeps=True, offload="optimizer")]
    for policy in policies:
        found = search_of(role, work, policy, made)
        for available in (5.0, 20.0, 40.0, 60.0, 79.0):
            best = found.best(available, is_shared=True)
            assert (None if isinstance(best, Shortage) else best) == best_of_all(role, work, policy, made, available)


def test_layers_are_kept_as_far_as_memory_has_room_for_them() -> None:
    role = demand("actor", SEVEN_B, data_parallel_size=8, offload="none", sequence_parallel_size=1)
    made = pool(8, role)
    search = search_of(role, work_of(made, 4096), PoolPolicy(zero_stage=2), made)
    chosen, seconds = [], []
    for available in (47.0, 60.0, 70.0, 100.0):
        best = search.best(available, is_shared=False)
        assert isinstance(best, RoleChoice)
        chosen.append((best.layout.gradient_checkpointing, best.layout.kept_layers))
        seconds.append(sum(best.seconds.values()))
    assert chosen == [(True, 0), (True, 14), (True, 21), (False, 0)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_micro_batch_is_no_larger_than_speed_needs() -> None:
    def choose(micro_batch_tokens: int | str = "auto") -> RoleChoice:
        degrees = {"data_parallel_size": 8, "sequence_parallel_size": 1, "offload": "none"}
        role = demand("actor", SEVEN_B, micro_batch_tokens=micro_batch_tokens, **degrees)  # type: ignore[arg-type]
        made = pool(8, role)
        search = search_of(role, work_of(made, 1024), PoolPolicy(zero_stage=2), made)
        best = search.best(300.0, is_shared=False)
        assert isinstance(best, RoleChoice)
        return best

    chosen = choose()
    tokens, seconds = chosen.layout.micro_batch_tokens, chosen.seconds["actor"]
    twice, half = (choose(size).seconds["actor"] for size in (2 * tokens, tokens // 2))
    assert twice < seconds <= 1.01 * twice < half


def test_a_micro_batch_holds_the_longest_sequence() -> None:
    """100,000 tokens are more than a micro-batch has otherwise. Sequence parallelism divides them among eight GPUs."""
    role = demand("actor", LONG, sequence_parallel_size=8)
    made = pool(16, role)
    best = search_of(role, work_of(made, 100_000), PoolPolicy(), made).best(70.0, is_shared=False)
    assert isinstance(best, RoleChoice)
    assert best.layout.micro_batch_tokens >= 100_000 > MAX_MICRO_BATCH_TOKENS


def test_pipeline_stages_where_they_leave_more_room_for_the_cache() -> None:
    """The weights of a 70B model take 33 GiB of each of 4 GPUs; with two stages on 8, each has half of the layers."""
    role = demand("rollout", SEVENTY_B)
    made = pool(16, role)
    on_four = {
        option.layout.pipeline_parallel_size: option.choose(48.0)
        for option in engines_of(role, work_of(made, 32768), made)
        if not isinstance(option, Shortage) and option.layout.tensor_parallel_size == 4
    }
    whole, halves = on_four[1], on_four[2]
    assert isinstance(whole, RoleChoice)
    assert isinstance(halves, RoleChoice)
    assert sum(halves.seconds.values()) < sum(whole.seconds.values())


def test_pipeline_stages_are_no_faster_with_enough_memory() -> None:
    for model in (SEVEN_B, SEVENTY_B):
        role = demand("rollout", model)
        made = pool(16, role)
        for option in engines_of(role, work_of(made, 4096), made):
            if not isinstance(option, Shortage) and option.fastest is not None:
                assert sum(option.fastest.seconds.values()) <= sum(option.seconds.values()) * (1 + 1e-9)
