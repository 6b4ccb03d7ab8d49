"""Weights that are not finite go nowhere."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlflow.engines.causal_lm.totals import check_finite
from rlflow.engines.deepspeed import DeepSpeedEngine
from rlflow.engines.torch import TorchEngine
from rlflow.errors import EngineError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Model, Optimizer
from tests.helpers import minibatch, sequences, spec

BATCH = minibatch(sequences([3, 2], [[4, 1], [2]]))
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 8, 32])
def test_one_value_is_found_wherever_it_is(dtype: torch.dtype, place: int) -> None:
    broken = torch.zeros(33, dtype=dtype)
    weights = {"a": torch.ones(5), "b": broken, "counts": torch.zeros(2, dtype=torch.int64), "empty": torch.zeros(0)}
    for value in (float("nan"), float("inf"), float("-inf")):
        broken[place] = value
        with pytest.raises(
            EngineError, match=r"^role actor: b of 2 weights are not finite in the checkpoint, and are not used"
        ):
            check_finite("actor", weights.items(), "in the checkpoint")
    broken[place] = torch.finfo(dtype).max
    check_finite("actor", weights.items(), "in the checkpoint")


def test_an_update_that_breaks_weights_is_an_error() -> None:
    engine = TorchEngine(spec(capabilities=["Trains"], optimizer=Optimizer(learning_rate=1e39)))
    with pytest.raises(EngineError) as raised:
        engine.update(BATCH, LikelihoodLoss())
    assert str(raised.value).startswith(f"role actor: {EMBEDDING} and ")
    assert "are not finite after an update with learning rate 1e+39" in str(raised.value)


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    engine = TorchEngine(spec(capabilities=["Trains"]))
    engine.export(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.get_input_embeddings().weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_that_is_broken_already(broken_model: Path) -> None:
    model = Model(path=str(broken_model), dtype="float32")
    with pytest.raises(EngineError, match=f"{EMBEDDING} of 25 weights are not finite after loading"):
        TorchEngine(spec(capabilities=["Trains"], model=model))


def test_a_checkpoint_that_is_broken_already(tmp_path: Path) -> None:
    engine = TorchEngine(spec(capabilities=["Trains"]))
    engine.save(tmp_path)
    saved = load_file(tmp_path / "weights-00000-00000.safetensors")
    saved[EMBEDDING][0] = float("inf")
    save_file(saved, tmp_path / "weights-00000-00000.safetensors")
    with pytest.raises(EngineError, match=f"{EMBEDDING} of 25 weights are not finite in the checkpoint"):
        engine.restore(tmp_path)


def test_weights_that_overflow_in_the_type_they_are_exported_in(tmp_path: Path) -> None:
    """The largest float32 is none of bfloat16."""
    model = spec().model
    engine = TorchEngine(spec(capabilities=["Trains"], model=Model(**{**vars(model), "dtype": "bfloat16"})))
    engine._model.get_input_embeddings().weight.data[0, 0] = torch.finfo(torch.float32).max
    with pytest.raises(EngineError, match=f"{EMBEDDING} of .* are not finite when exported in bfloat16"):
        engine.export(tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_padding_of_a_shard_is_not_checked() -> None:
    """Seven values over three ranks are shards of three: the last has two values that nobody has written."""
    shards = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, float("nan"), float("nan")]])
    weights = [SimpleNamespace(ds_tensor=shards[rank], ds_numel=7, ds_zero_partition_rank=rank) for rank in range(3)]
    assert [DeepSpeedEngine._local_values(weight).tolist() for weight in weights] == [[1, 2, 3], [4, 5, 6], [7]]
