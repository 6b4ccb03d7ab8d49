"""Two ranks of DeepSpeed with bfloat16 weights, for which it has optimizers of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.engines.base import EngineSpec
from rlflow.recipe import Optimizer
from rlflow.resources.models.lora import Lora
from tests.helpers import MODEL
from tests.integration.engine_process import EngineProcess, all_of, free_address, processes
from tests.integration.test_deepspeed import LOSS, Ranks, actor, park, policy_minibatch, split

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two() -> "Iterator[Sequence[EngineProcess]]":
    with processes(2) as started:
        yield started


@pytest.fixture(scope="module")
def address() -> str:
    return free_address()


@pytest.fixture(scope="module")
def single() -> Iterator[Sequence[EngineProcess]]:
    with processes(1) as started:
        yield started


def of_bfloat16(stage: int, lora: Lora | None = None) -> EngineSpec:
    of = replace(actor(stage), model=replace(MODEL, dtype="bfloat16"), lora=lora)
    return replace(of, optimizer=Optimizer(learning_rate=1e-3))


@pytest.mark.parametrize(
    ("stage", "lora"),
    [(1, None), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, Lora(rank=4, alpha=6)), (2, None)))],
)
def test_it_goes_on_from_what_it_saved_and_sleeps(
    two: Sequence[EngineProcess], address: str, stage: int, lora: Lora | None, tmp_path: Path
) -> None:
    one, other = (Ranks(two, of_bfloat16(stage, lora), address) for _ in range(2))
    one.update(split(policy_minibatch(0)), [LOSS] * 2)
    one.save([tmp_path] * 2)
    other.restore([tmp_path] * 2)
    for step in (1, 2):
        all_of(two, park, one._places)
        batch = split(policy_minibatch(step))
        assert one.update(batch, [LOSS] * 2) == other.update(batch, [LOSS] * 2)
    for (name, value), (_, same) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value == same).all(), name


@pytest.mark.parametrize(("stages", "sizes"), [((1, 2), (2, 1)), pytest.param((2, 1), (1, 2), marks=pytest.mark.soak)])
def test_another_layout_goes_on_from_it(
    two: Sequence[EngineProcess],
    single: Sequence[EngineProcess],
    address: str,
    stages: tuple[int, int],
    sizes: tuple[int, int],
    tmp_path: Path,
) -> None:
    alone = free_address()

    def ranks(stage: int, size: int) -> Ranks:
        of = of_bfloat16(stage)
        of = replace(of, layout=replace(of.layout, data_parallel_size=size))
        return Ranks(two if size == 2 else single, of, address if size == 2 else alone)

    def update(engine: Ranks, size: int, step: int) -> dict[str, float]:
        batch = policy_minibatch(step)
        return engine.update(split(batch) if size == 2 else [batch], [LOSS] * size)[0].values  # type: ignore[no-any-return]

    one, other = (ranks(stage, size) for stage, size in zip(stages, sizes, strict=True))
    for step in range(2):
        update(one, sizes[0], step)
    one.save([tmp_path] * sizes[0])
    other.restore([tmp_path] * sizes[1])
    for (name, value), (_, same) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value == same).all(), name
    for step in range(2, 5):
        expected = update(one, sizes[0], step)
        assert update(other, sizes[1], step) == pytest.approx(expected, rel=0.02, abs=0.01)
