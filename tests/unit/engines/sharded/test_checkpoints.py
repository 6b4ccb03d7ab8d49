"""Checkpoints of a role that is not sharded: its weights and its optimizer, in files."""

from pathlib import Path

import pytest
import torch
from torch.nn import Linear, Module
from torch.optim import AdamW

from rlflow.engines.sharded.checkpoints import restore_shards, save_shards
from rlflow.engines.sharded.trained_state import TrainedState
from rlflow.errors import EngineError
from tests.helpers import spec


class Trained:
    """A model of one layer, and its optimizer."""

    def __init__(self, outputs: int = 3) -> None:
        self.model: Module = Linear(4, outputs)
        self.weights = dict(self.model.named_parameters())
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.state = TrainedState(spec(), self.weights, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        save_shards(spec(), folder, self.state)

    def restore(self, folder: Path) -> None:
        restore_shards(spec(), folder, self.state)


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one, other = Trained(), Trained()
    for _ in range(3):
        one.step()
    other.step()
    one.save(tmp_path)
    files = [f"{kind}-00000-00000.safetensors" for kind in ("exp_avg", "exp_avg_sq", "weights")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, "optimizer.json"])
    other.restore(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    for _ in range(2):
        one.step()
        other.step()
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name])
        state, same = one.optimizer.state[weight], other.optimizer.state[other.weights[name]]
        assert all(torch.equal(state[kind], same[kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))


def test_a_model_that_was_not_trained_yet(tmp_path: Path) -> None:
    one, other = Trained(), Trained()
    one.save(tmp_path)
    other.restore(tmp_path)
    assert torch.equal(one.weights["weight"], other.weights["weight"])
    assert not any(other.optimizer.state.values())


def test_equal_states_have_equal_files(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        torch.manual_seed(0)
        trained = Trained()
        trained.step()
        trained.save(folder)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_another_model_is_refused(tmp_path: Path) -> None:
    Trained(outputs=1).save(tmp_path)
    with pytest.raises(EngineError, match=r"role actor: .* cannot be restored \(weights of weight: expected 12 values"):
        Trained().restore(tmp_path)


def test_a_file_that_is_missing_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"role actor: .* cannot be restored \(.*No such file"):
        Trained().restore(tmp_path)
    Trained().save(tmp_path)
    (tmp_path / "weights-00000-00000.safetensors").write_bytes(b"\x80\x04")
    with pytest.raises(EngineError, match=r"role actor: .* cannot be restored \(SafetensorError: "):
        Trained().restore(tmp_path)
