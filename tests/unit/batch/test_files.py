"""Files of rollouts: reading returns what was saved, and refuses files of an older format."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlflow.batch import Conversations, Packed
from rlflow.batch.files import read_rollouts, write_fields, write_rollouts
from rlflow.errors import StorageError
from tests.helpers import conversations

GIVEN = conversations([[[2, 3, 1], [1]]], [[1.0, 0.5], [0.25]])


def test_conversations_come_back(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.npz", GIVEN, GIVEN.rows)
    found = read_rollouts(tmp_path / "a.npz")
    assert isinstance(found, Conversations)
    assert found.turn.values.tolist() == [0, 0, -1, -1, -1, 1, 0]
    assert [found.turn_rewards[row].tolist() for row in range(2)] == [[1.0, 0.5], [0.25]]


def test_the_experts_of_tokens_come_back(tmp_path: Path) -> None:
    routing = Packed(np.frombuffer(bytes(range(20)), "V4"), np.array([0, 5, 5]))
    write_rollouts(tmp_path / "a.npz", replace(GIVEN, routing=routing), GIVEN.rows)
    again = read_rollouts(tmp_path / "a.npz").routing
    assert again is not None
    assert again.values.tobytes() == bytes(range(20))
    assert again.lengths.tolist() == [5, 0]


def test_an_older_format_is_refused(tmp_path: Path) -> None:
    fields = {name: value for name, value in vars(GIVEN).items() if name not in ("turn", "rows", "texts")}
    write_fields(
        tmp_path / "a.npz",
        {**fields, "own": np.ones(2), "texts": ["", ""], "rows": [{}, {}], "kind": "Conversations"},
    )
    with pytest.raises(StorageError, match="got that of an older one"):
        read_rollouts(tmp_path / "a.npz")
