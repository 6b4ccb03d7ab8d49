"""Rollouts in a checkpoint are the same when they are read again, and no file of it can run code."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.batch.packed import Packed
from rlflow.engines.group_progress import PartialResponse
from rlflow.environments.transcript import Transcript, build_conversations, resumed_transcript
from rlflow.environments.turn import EnvironmentSpec
from rlflow.errors import StorageError
from rlflow.rewards.base import Failure
from rlflow.runtime.generation import ahead_nodes
from rlflow.runtime.generation.ahead_nodes import load_rollouts, save_rollouts
from tests.helpers import prompts, rollouts, sequences

GIVEN = prompts((3, 3), step=4)


def assert_same(read: Rollouts, written: Rollouts) -> None:
    assert type(read) is type(written)
    assert read.keys.tolist() == written.keys.tolist()
    for column in ("prompt_ids", "response_ids", "logprobs", "versions"):
        pairs = zip(getattr(read, column), getattr(written, column), strict=True)
        assert all(one.tolist() == other.tolist() for one, other in pairs)
    assert (read.texts, read.rows, read.finished.tolist()) == (written.texts, written.rows, written.finished.tolist())


def samples() -> Prompts:
    return GIVEN.repeat(2)


def conversations(unfinished: int | None = None, state: str | bytes | None = None) -> Conversations:
    turn = PartialResponse(np.array([1, 2], np.int32), np.array([-0.5, -1.0], np.float32), np.array([3, 3], np.int32))
    transcripts = [Transcript(pieces=[turn], text=f"{row}", finished=True, is_done=True) for row in range(4)]
    if unfinished is not None:
        transcripts[unfinished] = Transcript(pieces=[turn], text="x", state=state)
    return build_conversations(samples(), transcripts, 1.0)


def test_rollouts_are_read_as_they_were(tmp_path: Path) -> None:
    written = replace(rollouts(sequences((3, 3), ((1, 2), (3, 1)))), keys=samples().keys)
    save_rollouts(tmp_path / "a.npz", written, GIVEN)
    assert_same(load_rollouts(tmp_path / "a.npz", GIVEN), written)


@pytest.mark.parametrize("state", [None, '{"number": 3}'])
def test_unfinished_conversations_are_read_as_they_were(state: str | bytes | None, tmp_path: Path) -> None:
    written = conversations(2, state)
    save_rollouts(tmp_path / "a.npz", written, GIVEN)
    read = load_rollouts(tmp_path / "a.npz", GIVEN)
    assert_same(read, written)
    assert isinstance(read, Conversations)
    assert read.unfinished[2].tobytes() == written.unfinished[2].tobytes()


def test_a_file_of_an_older_version_is_an_error_with_a_fix(tmp_path: Path) -> None:
    """Older versions wrote the values and lengths of a repeated column, and no lengths of runs."""
    file = tmp_path / "a.npz"
    save_rollouts(file, conversations(), GIVEN)
    with np.load(file) as saved:
        arrays = dict(saved)
    arrays["versions.lengths"] = arrays.pop("versions.run_lengths")
    del arrays["versions.runs_per_row"]
    np.savez(file, **arrays)
    with pytest.raises(StorageError) as raised:
        load_rollouts(file, GIVEN)
    assert str(raised.value).startswith(f"{file}: expected the format of this version of rlflow, got that of an older")
    assert "\n  Fix: " in str(raised.value)


def test_conversations_with_a_pickle_begin_again(tmp_path: Path) -> None:
    written = conversations(2, pickle.dumps({1, 2}))
    save_rollouts(tmp_path / "a.npz", written, GIVEN)
    assert_same(load_rollouts(tmp_path / "a.npz", GIVEN), written.take(np.array([0, 1, 3])))


def test_a_pickle_in_a_file_from_someone_else_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_nodes, "_without_pickles", lambda given: given)
    save_rollouts(tmp_path / "a.npz", conversations(1, pickle.dumps({1, 2})), GIVEN)
    monkeypatch.undo()
    read = load_rollouts(tmp_path / "a.npz", GIVEN)
    assert read.keys.tolist() == samples().keys[[0, 2, 3]].tolist()


def test_a_pickle_that_claims_to_be_json_is_never_loaded(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (ran,)

    written = conversations(1, pickle.dumps(Harmful()))
    rests = [written.unfinished[row] for row in range(4)]
    rests[1] = rests[1][1:]  # without the first byte, which says that it holds a pickle
    save_rollouts(tmp_path / "a.npz", replace(written, unfinished=Packed.from_rows(rests, np.uint8)), GIVEN)
    read = load_rollouts(tmp_path / "a.npz", GIVEN)
    assert isinstance(read, Conversations)
    columns = (read.response_ids[1], read.logprobs[1], read.versions[1])
    transcript = resumed_transcript(PartialResponse(*columns, read.unfinished[1].tobytes()))
    call: Any = EnvironmentSpec("tests.unit.environments.test_turn:Counting", {}, 1.0).load("harmful").call
    [answer] = call(["a"], [({}, transcript.state)])
    assert isinstance(answer, Failure)
    assert not ran.exists()
