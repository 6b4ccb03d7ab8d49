"""The weights and the optimizer's state of a trained model, in files."""

from pathlib import Path

import pytest
import torch
from torch.nn import Linear, Module
from torch.optim import AdamW

from rlflow.engines.state_files import restore_state, save_state
from rlflow.errors import EngineError


class Trained:
    """A model of one layer, and its optimizer."""

    def __init__(self, outputs: int = 3) -> None:
        self.model: Module = Linear(4, outputs)
        self.weights = dict(self.model.named_parameters())
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        save_state(folder, self.weights, self.optimizer)

    def restore(self, folder: Path) -> None:
        restore_state("actor", folder, self.weights, self.optimizer)


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one, other = Trained(), Trained()
    for _ in range(3):
        one.step()
    other.step()
    one.save(tmp_path)
    names = ["exp_avg.safetensors", "exp_avg_sq.safetensors", "step.safetensors", "weights.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
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
    assert not other.optimizer.state


def test_another_model_is_refused(tmp_path: Path) -> None:
    Trained(outputs=1).save(tmp_path)
    with pytest.raises(EngineError, match=r"weights.safetensors' is of another model: bias has shape \(1,\) there"):
        Trained().restore(tmp_path)


def test_a_file_that_is_missing_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"role actor: '.*weights.safetensors' cannot be read"):
        Trained().restore(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"\x80\x04")
    with pytest.raises(EngineError, match=r"role actor: '.*weights.safetensors' cannot be read"):
        Trained().restore(tmp_path)
