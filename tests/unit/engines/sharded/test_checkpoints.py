"""Checkpoints of DeepSpeed are read as data, as every version of Python stores it."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest

from rlflow.engines.sharded.checkpoints import loading_data_only


class Stored:
    """Stored as a call of getattr, as Python before 3.11.4 stores a member of an enumeration."""

    def __init__(self, kind: type, name: str) -> None:
        self._call = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._call


@pytest.mark.slow
def test_getattr_gives_a_zero_stage_and_nothing_else(tmp_path: Path) -> None:
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"stage": Stored(ZeroStageEnum, "weights")}, tmp_path / "stage.pt")
    torch.save({"stage": Stored(LossScaler, "backward")}, tmp_path / "other.pt")
    with loading_data_only():
        assert torch.load(tmp_path / "stage.pt", weights_only=False) == {"stage": ZeroStageEnum.weights}
        with pytest.raises(UnpicklingError, match="something else than a ZeRO stage"):
            torch.load(tmp_path / "other.pt", weights_only=False)
