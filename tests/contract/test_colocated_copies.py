"""vLLM's own sender over CUDA IPC, with the weights of model cards as meta tensors."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlflow.engines.causal_lm.adapters import transfer_name
from rlflow.runtime.weights.gpu import Receivers, make_sender, send_weights
from tests.unit.resources.models.test_architecture import CARDS, FEW, card, config_fields

# vLLM takes seconds to import.
pytestmark = pytest.mark.slow

GIB = 2**30


class Torch:
    """The module torch with tensors of a GPU on the meta device. Keeps the buffers that are made there."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.cuda = Mock()
        self.accelerator = Mock()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        self.buffers.append(torch.empty(size, dtype=dtype, device="meta"))
        return self.buffers[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Replace torch in vLLM's sender by a stand-in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.weight_transfer import ipc_engine, packed_tensor
    there = Torch()
    monkeypatch.setattr(packed_tensor, "torch", there)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ("how to open it",)))
    monkeypatch.setattr(ipc_engine, "torch", there)
    return there


class Recorder(Receivers):
    """Receivers that keep what they are told."""

    def __init__(self) -> None:
        super().__init__(["an engine"], gpus_each=1)
        self.told: list[tuple[str, dict[str, Any]]] = []

    def _call(self, method: str, arguments: Any) -> None:
        self.told += [(method, each) for each in arguments]


def model_of(path: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_fields(card(path))))


@pytest.mark.parametrize(
    "cards",
    [
        pytest.param([path for path in CARDS if path.stem in FEW], id="few"),
        pytest.param([path for path in CARDS if path.stem not in FEW], marks=pytest.mark.soak, id="others"),
    ],
)
def test_every_card_passes_through_the_sender(cards: list[Path], gpu: Torch, subtests: pytest.Subtests) -> None:
    for path in cards:
        model = model_of(path)
        for dtype in (torch.bfloat16, torch.float32):
            state = model.to(dtype).state_dict()
            with subtests.test(path.stem, dtype=dtype):
                gpu.buffers.clear()
                check_transfer({transfer_name(name): weight.detach() for name, weight in state.items()}, gpu)


def check_transfer(weights: dict[str, torch.Tensor], gpu: Torch) -> None:
    def passes() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()

    engine: Any = SimpleNamespace(weights=passes)
    receivers = Recorder()
    send_weights(make_sender(engine, "ipc", receivers, rank=0, address="127.0.0.1:1"), "ipc")
    chunks = [told["update_info"] for method, told in receivers.told if method == "update_weights"]
    assert [name for chunk in chunks for name in chunk["names"]] == list(weights)
    assert [method for method, _ in receivers.told[1:3]] == ["init_weight_transfer_engine", "start_weight_update"]
    assert receivers.told[-1][0] == "finish_weight_update"
    (buffer,) = gpu.buffers
    assert max(sum(chunk["tensor_sizes"]) for chunk in chunks) <= buffer.nbytes
    assert buffer.nbytes == max(GIB, max(weight.nbytes for weight in weights.values()))
