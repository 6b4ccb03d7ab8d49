"""Two ranks of DeepSpeed, and of the plain engine, against the plain engine on one."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from rlflow.batch import Minibatch
from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.errors import EngineError, NotFiniteError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Layout
from tests.helpers import ARCHITECTURE, MODEL, minibatch, sequences, spec
from tests.integration.engine_process import EngineProcess, all_of, call, free_address, processes

SHARED_PROCESSES = "DeepSpeed"
# DeepSpeed has one optimizer for stages 1 and 2.
SAME_AS_2 = pytest.param(1, marks=pytest.mark.soak)
pytestmark = pytest.mark.slow

GIVEN = sequences([3, 6, 2], [[4, 9, 1], [2, 7], [5]])
STEPS = 5


def share_everything() -> None:
    """Have DeepSpeed shard the small weights of tests too, with small buffers. Called in the child process."""
    from rlflow.engines import deepspeed
    from rlflow.engines.sharded.settings import deepspeed_config

    def config(of: EngineSpec, *, trains: bool) -> dict[str, Any]:
        usual = deepspeed_config(of, trains=trains)
        small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100_000}
        return usual | {"zero_optimization": usual["zero_optimization"] | small}

    vars(deepspeed)["deepspeed_config"] = config


def build_deepspeed(engines: list[Any], of: EngineSpec, sgd: bool) -> int:
    """Build an engine with DeepSpeed in the child process."""
    from rlflow.engines import deepspeed

    share_everything()
    engines.append(with_sgd(deepspeed.DeepSpeedEngine, sgd)(of))
    return len(engines) - 1


def with_sgd(engine: Any, sgd: bool) -> Any:
    """Return a class of engines, on demand one whose optimizer is SGD, which does not magnify rounding."""
    import torch

    class Engine(engine):  # type: ignore[misc]
        def _build_optimizer(self, weights: Any) -> Any:
            return torch.optim.SGD(weights.values(), lr=self._spec.optimizer.learning_rate)

    return Engine if sgd else engine


def build_torch(engines: list[Any], of: EngineSpec, sgd: bool) -> int:
    """Build an engine with torch in the child process."""
    engines.append(plain(sgd, of=of))
    return len(engines) - 1


class Ranks:
    """An engine on all ranks: ``update`` and the like split rows as the caller says."""

    def __init__(
        self,
        ranks: Sequence[EngineProcess],
        of: EngineSpec,
        address: str,
        sgd: bool = False,
        build: Callable[..., int] = build_deepspeed,
    ) -> None:
        self._ranks = ranks
        specs = [replace(of, rank=rank, world_size=len(ranks), address=address) for rank in range(len(ranks))]
        self._places = all_of(ranks, build, specs, [sgd] * len(ranks))

    def __getattr__(self, method: str) -> Any:
        """Return a function that takes a value for each rank of every argument, and returns the result of each rank."""
        methods = [method] * len(self._ranks)
        return lambda *arguments: all_of(self._ranks, call, self._places, methods, *arguments)


def actor(stage: int, sequence_parallel_size: int = 1, **options: Any) -> EngineSpec:
    layout = Layout(
        micro_batch_tokens=16,
        zero_stage=stage,
        data_parallel_size=2 // sequence_parallel_size,
        sequence_parallel_size=sequence_parallel_size,
        **options,
    )
    return replace(spec(capabilities=["Trains", "Scores"], optimizer=Optimizer(learning_rate=1e-2)), layout=layout)


def reference(stage: int, sequence_parallel_size: int = 1) -> EngineSpec:
    """Return the spec of an engine that scores and is not trained."""
    return replace(actor(stage, sequence_parallel_size), role="reference", capabilities=frozenset({"Scores"}))


def of_path(folder: Path) -> Model:
    return Model(path=str(folder), dtype="float32")


def policy_minibatch(step: int) -> Minibatch:
    draw = np.random.default_rng(step)
    size = len(GIVEN.response_ids.values)
    old = {"old_logprobs": draw.normal(-2.5, 0.2, size), "reference": draw.normal(-2.5, 0.2, size)}
    return minibatch(GIVEN, step, advantages=draw.normal(0, 1, size), **old)


LOSS = PolicyUpdate(clip_eps=0.2, kl_coef=0.1).loss(0.9)


def split(batch: Any) -> list[Any]:
    """Return five rows and one, because ranks need not have the same number of rows or micro-batches."""
    return [batch.take(np.arange(5)), batch.take(np.array([5]))]


def plain(sgd: bool = False, model: Model = MODEL, of: EngineSpec | None = None) -> TorchEngine:
    import torch

    engine = TorchEngine(of or spec(model=model, optimizer=Optimizer(learning_rate=1e-2)))
    if sgd:
        engine._optimizer = torch.optim.SGD(engine._model.parameters(), lr=1e-2)
    return engine


@pytest.mark.parametrize(("stage", "sgd"), [(0, True), (2, False), (3, True), (3, False)])
def test_it_trains_as_the_plain_engine_does(two: Sequence[EngineProcess], address: str, stage: int, sgd: bool) -> None:
    compare_training(Ranks(two, actor(stage), address, sgd), plain(sgd), sgd, split)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_are_not_finite_end_the_update(two: Sequence[EngineProcess], address: str, stage: int) -> None:
    """Every rank raises the error, although each sees only its shard under ZeRO 3."""
    ranks = Ranks(two, replace(actor(stage), optimizer=Optimizer(learning_rate=1e39)), address)
    for process, place, part in zip(two, ranks._places, split(policy_minibatch(0)), strict=True):
        process.send(call, place, "update", part, LOSS)
    for process in two:
        with pytest.raises(
            EngineError, match=r"role actor: \S+weight and .* not finite after an update with learning rate 1e\+39"
        ):
            raise process.answer()


def compare_training(ours: Ranks, expected: TorchEngine, sgd: bool, shares: Callable[[Minibatch], list[Any]]) -> None:
    """Compare five steps. AdamW divides small gradients by their own size, so that rounding shows."""
    for step in range(STEPS):
        batch = policy_minibatch(step)
        parts = shares(batch)
        first, *others = ours.update(parts, [LOSS] * len(parts))
        assert all(other == first for other in others)
        metrics = expected.update(batch, LOSS).values
        assert metrics["grad_norm"] > 0.01
        assert first.values == pytest.approx(metrics, abs=1e-5 if sgd else 1e-4)
    weights = dict(expected.weights())
    for name, value in ours.weights()[0]:
        assert float((value - weights.pop(name)).abs().max()) <= (1e-6 if sgd else 1e-3), name
    assert not weights


@pytest.mark.parametrize(
    ("build", "stage", "sgd", "key_heads"),
    [
        (build_torch, 0, True, 1),
        (build_torch, 0, True, 2),
        (build_deepspeed, 0, True, 2),
        (build_deepspeed, 3, True, 1),
        (build_deepspeed, 3, False, 2),
    ],
)
def test_ranks_that_share_their_tokens_train_as_one_does(
    two: Sequence[EngineProcess], address: str, build: Callable[..., int], stage: int, sgd: bool, key_heads: int
) -> None:
    model = replace(MODEL, architecture=replace(ARCHITECTURE, num_key_value_heads=key_heads))
    of = actor(stage, sequence_parallel_size=2, gradient_checkpointing=stage == 3, kept_layers=stage // 3)
    ours, expected = Ranks(two, replace(of, model=model), address, sgd, build), plain(sgd, model)
    scores = expected.logprobs(GIVEN, 0.7).values.values
    for rank in ours.logprobs([GIVEN] * 2, [0.7] * 2):
        assert rank.values.values == pytest.approx(scores, abs=1e-6)
    compare_training(ours, expected, sgd, lambda batch: [batch] * 2)
    # The only response token is predicted at the end: the first rank has none.
    batch = minibatch(sequences([9], [[1]]))
    metrics = ours.update([batch] * 2, [LikelihoodLoss()] * 2)[0].values
    assert metrics == pytest.approx(expected.update(batch, LikelihoodLoss()).values, abs=1e-4)


@pytest.mark.soak
def test_two_shares_of_the_data_of_two_ranks_each() -> None:
    layout = Layout(micro_batch_tokens=16, zero_stage=3, data_parallel_size=2, sequence_parallel_size=2)
    with processes(4) as four:
        ours = Ranks(four, replace(actor(3), layout=layout), free_address(), sgd=True)
        compare_training(ours, plain(sgd=True), True, lambda batch: [part for part in split(batch) for _ in range(2)])


@pytest.mark.parametrize(("build", "stage"), [(build_torch, 0), (build_deepspeed, 0), (build_deepspeed, 3)])
def test_values_of_ranks_that_share_their_tokens(
    two: Sequence[EngineProcess], address: str, build: Callable[..., int], stage: int
) -> None:
    of = replace(actor(stage, sequence_parallel_size=2), capabilities=frozenset({"Values"}))
    expected = TorchEngine(spec(capabilities=["Values"])).values(GIVEN).values.values
    for rank in Ranks(two, of, address, build=build).values([GIVEN] * 2):
        assert rank.values.values == pytest.approx(expected, abs=1e-6)


def test_plain_ranks_go_on_from_what_the_first_one_saved(
    two: Sequence[EngineProcess], address: str, tmp_path: Path
) -> None:
    one, other = (Ranks(two, actor(0, sequence_parallel_size=2), address, build=build_torch) for _ in range(2))
    batch = [policy_minibatch(0)] * 2
    one.update(batch, [LOSS] * 2)
    one.save([tmp_path] * 2)
    one.export([tmp_path / "exported"] * 2)
    other.restore([tmp_path] * 2)
    assert one.update(batch, [LOSS] * 2) == other.update(batch, [LOSS] * 2)
    alone = plain(of=actor(0))
    alone.restore(tmp_path)
    alone.export(tmp_path / "alone")
    first, second = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("exported", "alone"))
    assert first == second


def test_heads_that_cannot_be_shared_are_told(two: Sequence[EngineProcess], address: str) -> None:
    model = replace(MODEL, architecture=replace(ARCHITECTURE, num_attention_heads=3, num_key_value_heads=3))
    with pytest.raises(EngineError, match="sequence_parallel_size 2 does not divide 3 attention heads"):
        Ranks(two, replace(actor(0, sequence_parallel_size=2), model=model), address)


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_scores_its_rows(two: Sequence[EngineProcess], address: str, stage: int) -> None:
    ours = Ranks(two, reference(stage), address).logprobs(split(GIVEN), [0.7] * 2)
    expected = plain().logprobs(GIVEN, 0.7).values.values
    assert np.concatenate([part.values.values for part in ours]) == pytest.approx(expected, abs=1e-6)


def test_values(two: Sequence[EngineProcess], address: str) -> None:
    of = replace(actor(3), capabilities=frozenset({"Trains", "Values"}))
    ours = Ranks(two, of, address).values(split(GIVEN))
    expected = TorchEngine(spec(capabilities=["Values"])).values(GIVEN).values.values
    assert np.concatenate([part.values.values for part in ours]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_with_tied_weights_from_a_folder_and_back(
    two: Sequence[EngineProcess], address: str, stage: int, tmp_path: Path
) -> None:
    tied = replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=True))
    first = plain(model=tied)
    first.export(tmp_path / "first")
    ours = Ranks(two, replace(actor(stage), model=of_path(tmp_path / "first")), address)
    metrics = ours.update(split(minibatch(GIVEN)), [LikelihoodLoss()] * 2)[0].values
    assert metrics == pytest.approx(first.update(minibatch(GIVEN), LikelihoodLoss()).values, abs=1e-5)
    ours.export([tmp_path / "second"] * 2)
    again = plain(model=of_path(tmp_path / "second"))
    assert [name for name, _ in ours.weights()[0]] == [name for name, _ in again.weights()]
    for (name, value), (_, same) in zip(ours.weights()[0], again.weights(), strict=True):
        assert (value == same).all(), name
    assert again._tokenizer.decode(again._tokenizer("1+2=")["input_ids"]) == "1+2="


def test_a_new_value_head_is_one_on_all_ranks(two: Sequence[EngineProcess], address: str, tmp_path: Path) -> None:
    plain().export(tmp_path)
    of = replace(actor(3), model=of_path(tmp_path), capabilities=frozenset({"Trains", "Values"}))
    first, second = Ranks(two, of, address).values([GIVEN] * 2)
    assert first.values.values.tolist() == second.values.values.tolist()
    assert 1e-4 < first.values.values.std() < 1


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 2, "offload": "optimizer", "gradient_checkpointing": True},
        {"stage": 3, "offload": "weights"},
    ],
)
def test_it_goes_on_from_what_it_saved(
    two: Sequence[EngineProcess], address: str, options: dict[str, Any], tmp_path: Path
) -> None:
    one, other = (Ranks(two, actor(**options), address) for _ in range(2))
    one.update(split(policy_minibatch(0)), [LOSS] * 2)
    one.save([tmp_path] * 2)
    other.restore([tmp_path] * 2)
    for step in (1, 2):
        batch = split(policy_minibatch(step))
        assert one.update(batch, [LOSS] * 2) == other.update(batch, [LOSS] * 2)
    for (name, value), (_, same) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value == same).all(), name


@pytest.mark.parametrize(
    ("stages", "sizes", "tied"),
    [
        ((0, 3), (2, 1), False),
        ((1, 2), (2, 1), True),
        ((2, 0), (1, 2), False),
        ((3, 3), (2, 1), True),
        ((3, 1), (1, 2), True),
        ((2, 3), (2, 2), False),
        ((3, 0), (2, 2), False),
    ],
)
def test_another_number_of_ranks_and_another_zero_stage_go_on_from_it(
    two: Sequence[EngineProcess],
    single: Sequence[EngineProcess],
    address: str,
    stages: tuple[int, int],
    sizes: tuple[int, int],
    tied: bool,
    tmp_path: Path,
) -> None:
    """The weights are the same, and after three more steps equal to 1e-6: so is AdamW's state."""
    model = replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=tied))
    alone = free_address()

    def ranks(stage: int, size: int) -> Ranks:
        of = replace(actor(stage), model=model)
        layout = replace(of.layout, data_parallel_size=size)
        return Ranks(two if size == 2 else single, replace(of, layout=layout), address if size == 2 else alone)

    def update(engine: Ranks, size: int, step: int) -> dict[str, float]:
        batch = policy_minibatch(step)
        return engine.update(split(batch) if size == 2 else [batch], [LOSS] * size)[0].values  # type: ignore[no-any-return]

    one, other = (ranks(stage, size) for stage, size in zip(stages, sizes, strict=True))
    for step in range(2):
        update(one, sizes[0], step)
    one.save([tmp_path] * sizes[0])
    saved = {path.name for path in tmp_path.iterdir()}
    other.restore([tmp_path] * sizes[1])
    for (name, value), (_, same) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value == same).all(), name
    for step in range(2, 5):
        expected = update(one, sizes[0], step)
        assert update(other, sizes[1], step) == pytest.approx(expected, abs=1e-5)
    for (name, value), (_, close) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value - close).abs().max() < 1e-6, name
    assert {path.name for path in tmp_path.iterdir()} == saved


def saved_values(folder: Path) -> dict[str, Any]:
    """Return the values of each weight and moment in a checkpoint, put together from the ranges in its files."""
    ranges: dict[str, dict[int, Any]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                start = json.loads((opened.metadata() or {}).get("starts", "{}")).get(name, 0)
                ranges.setdefault(f"{file.name.split('-')[0]} {name}", {})[start] = opened.get_tensor(name)
    return {name: np.concatenate([parts[start] for start in sorted(parts)]) for name, parts in ranges.items()}


def test_bfloat16_keeps_its_masters_and_moments_from_layout_to_layout(
    two: Sequence[EngineProcess], single: Sequence[EngineProcess], address: str, tmp_path: Path
) -> None:
    """Each engine restores what the one before has saved, and saves the same values."""
    # Some weights have an odd number of values, so ZeRO 3 pads the shard of the second rank.
    bfloat16 = replace(MODEL, dtype="bfloat16", architecture=replace(ARCHITECTURE, hidden_size=15))
    first = Ranks(two, replace(actor(1), model=bfloat16), address)
    for step in range(2):
        first.update(split(policy_minibatch(step)), [LOSS] * 2)
    before = tmp_path / "first"
    before.mkdir()
    first.save([before] * 2)
    expected = saved_values(before)
    assert {name.split()[0] for name in expected} == {"weights", "exp_avg", "exp_avg_sq"}
    # bfloat16 has 16 bits less than float32.
    assert any((value.view(np.uint32) & 0xFFFF).any() for value in expected.values())
    layouts: list[tuple[int, dict[str, Any]]] = [
        (1, {"stage": 3}),
        (2, {"stage": 2, "offload": "optimizer"}),
        (2, {"stage": 3, "offload": "weights"}),
        (1, {"stage": 1}),
    ]
    for number, (size, options) in enumerate(layouts):
        of = replace(actor(**options), model=bfloat16)
        of = replace(of, layout=replace(of.layout, data_parallel_size=size))
        ranks = Ranks(two, of, address) if size == 2 else Ranks(single, of, free_address())
        after = tmp_path / str(number)
        restore_and_save(ranks, size, before, after)
        assert_same_values(expected, saved_values(after))
        for (name, value), (_, same) in zip(first.weights()[0], ranks.weights()[0], strict=True):
            assert (value == same).all(), name
        before = after
    # The first engine has made another step since.
    first.update(split(policy_minibatch(2)), [LOSS] * 2)
    restore_and_save(first, 2, before, tmp_path / "again")
    assert_same_values(expected, saved_values(tmp_path / "again"))
    for (name, value), (_, same) in zip(ranks.weights()[0], first.weights()[0], strict=True):
        assert (value == same).all(), name


def restore_and_save(ranks: Ranks, size: int, before: Path, after: Path) -> None:
    after.mkdir()
    ranks.restore([before] * size)
    ranks.save([after] * size)


def assert_same_values(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] == value).all(), name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "exp_avg-00001-00000.safetensors").unlink(),
            "exp_avg of .*: expected .* values, got",
        ),
        (
            lambda folder: shutil.copy(
                folder / "exp_avg-00000-00000.safetensors", folder / "exp_avg-00002.safetensors"
            ),
            "exp_avg of .*: expected a range that starts at .*, got 0",
        ),
        (lambda folder: (folder / "weights-00001-00000.safetensors").write_bytes(b"no header"), "Error while deserial"),
        (
            lambda folder: save_file({"lm_head.weight": np.zeros(3, np.float16)}, folder / "weights-2.safetensors"),
            "weights-2.safetensors has no range of lm_head.weight",
        ),
        (lambda folder: (folder / "optimizer.json").write_text("{}"), "optimizer.json has no number of steps"),
        (lambda folder: (folder / "optimizer.json").unlink(), "No such file"),
    ],
)
def test_files_that_cannot_be_restored(
    two: Sequence[EngineProcess], address: str, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    """All ranks say so, although only one of them may have noticed."""
    one = Ranks(two, actor(1), address)
    one.update(split(policy_minibatch(0)), [LOSS] * 2)
    one.save([tmp_path] * 2)
    damage(tmp_path)
    with pytest.raises(EngineError, match=rf"role actor: '.*' cannot be restored .*{message}"):
        one.restore([tmp_path] * 2)
    one.logprobs(split(GIVEN), [0.7] * 2)


def test_a_checkpoint_of_another_model(two: Sequence[EngineProcess], address: str, tmp_path: Path) -> None:
    wide = replace(MODEL, architecture=replace(ARCHITECTURE, intermediate_size=64))
    Ranks(two, replace(actor(1), model=wide), address).save([tmp_path] * 2)
    with pytest.raises(EngineError, match=r"weights of model.layers.0.mlp.*: expected 512 values, got 1024"):
        Ranks(two, actor(3), address).restore([tmp_path] * 2)


def test_a_checkpoint_has_no_pickles(two: Sequence[EngineProcess], address: str, tmp_path: Path) -> None:
    Ranks(two, actor(3), address).save([tmp_path] * 2)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("stage", [SAME_AS_2, 2, 3])
def test_bfloat16_has_masters_in_float32(two: Sequence[EngineProcess], address: str, stage: int) -> None:
    """Steps smaller than bfloat16 can tell add up all the same."""
    of = replace(actor(stage), model=replace(MODEL, dtype="bfloat16"), optimizer=Optimizer(learning_rate=1e-4))
    ours = Ranks(two, of, address)
    first = [ours.update(split(minibatch(GIVEN)), [LikelihoodLoss()] * 2)[0].values["loss"] for _ in range(20)]
    expected = TorchEngine(spec(optimizer=Optimizer(learning_rate=1e-4)))
    exact = [expected.update(minibatch(GIVEN), LikelihoodLoss()).values["loss"] for _ in range(20)]
    assert first == pytest.approx(exact, abs=0.02)
    assert first[0] - first[-1] == pytest.approx(exact[0] - exact[-1], rel=0.2)
    assert {str(value.dtype) for _, value in ours.weights()[0]} == {"torch.bfloat16"}


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_a_loss_that_is_not_finite_changes_nothing_on_any_rank(
    two: Sequence[EngineProcess], address: str, stage: int, dtype: Literal["float32", "bfloat16"]
) -> None:
    """One of them has it, and all refuse the step. The next one is made as if there had been none between."""
    of = replace(actor(stage), model=replace(MODEL, dtype=dtype))
    message = r"role actor: the loss is nan at .* prompt 0 sample 0; first at token 0\); not finite there: advantages"
    ours, undisturbed = Ranks(two, of, address), Ranks(two, of, address)
    for step in range(2):
        for engine in (ours, undisturbed):
            engine.update(split(policy_minibatch(step)), [LOSS] * 2)
        before = dict(ours.weights()[0])
        broken = policy_minibatch(step)
        broken.columns["advantages"].values[0] = np.inf
        with pytest.raises(NotFiniteError, match=message):
            ours.update(split(broken), [LOSS] * 2)
        assert all((before[name] == value).all() for name, value in ours.weights()[0])
    for engine in (ours, undisturbed):
        engine.update(split(policy_minibatch(2)), [LOSS] * 2)
    expected = dict(undisturbed.weights()[0])
    assert all((expected[name] == value).all() for name, value in ours.weights()[0])


def test_a_gradient_that_is_not_finite_changes_nothing(two: Sequence[EngineProcess], address: str) -> None:
    """The square of the gradient is too large, but not the loss. Under ZeRO, DeepSpeed squares in float64."""
    batch = policy_minibatch(0)
    batch.columns["advantages"].values[:] = 1e37
    ours = Ranks(two, actor(0), address)
    before = dict(ours.weights()[0])
    with pytest.raises(NotFiniteError, match=r"role actor: grad_norm is (inf|nan), although"):
        ours.update(split(batch), [LOSS] * 2)
    assert all((before[name] == value).all() for name, value in ours.weights()[0])


def most_gathered(engines: list[Any], place: int) -> int:
    """Return how many weights are complete at once while all are read, a few bytes at a time."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from rlflow.engines import deepspeed

    usual = deepspeed._GATHERED_BYTES
    vars(deepspeed)["_GATHERED_BYTES"] = 1
    whole = [
        sum(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in engines[place]._model.parameters())
        for _ in engines[place].weights()
    ]
    vars(deepspeed)["_GATHERED_BYTES"] = usual
    assert not any(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in engines[place]._model.parameters())
    return int(max(whole))


def test_no_rank_gathers_the_whole_model(two: Sequence[EngineProcess], address: str) -> None:
    ours = Ranks(two, actor(3), address)
    assert all_of(two, most_gathered, ours._places) == [1, 1]


def park(engines: list[Any], place: int) -> float:
    """Return the released bytes as a multiple of those of the weights, and restore them. Sleep does nothing on CPUs."""
    engine = engines[place]
    engine.release_memory()
    before = call(engines, place, "weights")
    for _ in range(2):
        engine._offload()
        away = [engine._offloaded_weights, engine._offloaded_state]
        given_up: int = sum(parked.num_bytes for parked in away)
        assert all(storage.nbytes() == 0 for parked in away for storage, _ in parked._storages)
        engine.wake(True)
        for (name, weight), (_, same) in zip(call(engines, place, "weights"), before, strict=True):
            assert weight.equal(same), name
    assert all(storage.nbytes() == 0 for storage, _ in engine._offloaded_state._storages)
    engine.wake()
    # An engine that is awake, as on a GPU, releases its state and keeps its weights.
    device, engine._device = engine._device, SimpleNamespace(type="cuda")
    engine.wake(True)
    engine._device = device
    assert engine._offloaded_state.num_bytes > 0
    assert engine._offloaded_weights.num_bytes == 0
    for (name, weight), (_, same) in zip(call(engines, place, "weights"), before, strict=True):
        assert weight.equal(same), name
    engine.wake()
    return given_up / int(sum(4 * getattr(weight, "ds_numel", weight.numel()) for weight in engine._model.parameters()))


@pytest.mark.parametrize(("stage", "share"), [(0, 3), (2, 2), (3, 1.5)])
def test_what_is_parked_comes_back(two: Sequence[EngineProcess], address: str, stage: int, share: float) -> None:
    """Weights and two moments in float32, as ZeRO shares them between two ranks; and masters, where it keeps them."""
    one, other = (Ranks(two, actor(stage), address) for _ in range(2))
    for engine in (one, other):
        engine.update(split(policy_minibatch(0)), [LOSS] * 2)
    assert min(all_of(two, park, one._places)) >= share
    batch = split(policy_minibatch(1))
    assert one.update(batch, [LOSS] * 2) == other.update(batch, [LOSS] * 2)
