"""Recorded responses come back as they were, or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Conversations, Image, Packed, Prompts, Repeated, Rollouts, images_of, pack_images
from rlflow.compiler.continuation import experiment_of
from rlflow.engines import transformers
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm import decoding
from rlflow.engines.fake import FakeEngine
from rlflow.engines.journal import Journal, journal_folder, open_journal, remove_records
from rlflow.engines.serving.sessions import pack_rows
from rlflow.engines.transformers import TransformersEngine
from tests.conftest import CONFIG_DIR
from tests.helpers import WritingEngine, load, prompts, spec
from tests.unit.runtime.generation.test_ahead_nodes_saved import assert_same, conversations

SAMPLING = Sampling(max_tokens=4, group_size=2)
GIVEN = prompts((3, 5, 2), step=7)
SAMPLES = GIVEN.repeat(2)


def rollouts_of(given: Prompts = GIVEN, version: int = 7) -> Rollouts:
    """Return rollouts of the given prompts. Some of them end before the limit."""
    made = FakeEngine(spec("rollout")).generate(given, SAMPLING)
    return replace(made, versions=Repeated(np.full(len(made), version, np.int32), made.response_ids.lengths))


def journal_at(folder: Path, role: str = "rollout", version: int = 7) -> Journal:
    made = Journal(folder, role)
    made.version = version
    return made


def found(records: Journal, samples: Prompts = SAMPLES, sampling: Sampling = SAMPLING) -> tuple[list[int], Any]:
    rows, rollouts = records.recorded(samples.keys).find(samples, sampling)
    return rows.tolist(), rollouts


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("step-*/*")
    return file


def test_responses_come_back_as_they_were(tmp_path: Path) -> None:
    """Two engines record, and a third finds responses in any order, with the rows of its own samples."""
    made, order = rollouts_of(), np.array([5, 1, 0, 3])
    journal_at(tmp_path).add(made.take(np.arange(4)), SAMPLES.take(np.arange(4)), SAMPLING)
    journal_at(tmp_path).add(made.take(np.array([5, 4])), SAMPLES.take(np.array([5, 4])), SAMPLING)
    rows, rollouts = found(journal_at(tmp_path), SAMPLES.take(order))
    assert rows == [0, 1, 2, 3]
    assert_same(rollouts, made.take(order))
    assert rollouts.versions.runs_per_row is None
    others = prompts((4,), step=9)
    both = Prompts.concatenate([SAMPLES.take(np.array([2])), others.repeat(2), SAMPLES.take(np.array([3]))])
    rows, rollouts = found(journal_at(tmp_path), both)
    assert rows == [0, 3]
    assert_same(rollouts, made.take(np.array([2, 3])))


def test_conversations_come_back_with_what_their_environment_added(tmp_path: Path) -> None:
    samples = prompts((3, 3), step=4).repeat(2)
    made = replace(conversations(), rows=tuple({**row, "environment_reward": 0.5} for row in samples.rows))
    records = journal_at(tmp_path, version=3)
    records.add(made, samples, SAMPLING)
    rows, rollouts = found(records, samples)
    assert rows == [0, 1, 2, 3]
    assert_same(rollouts, made)
    assert isinstance(rollouts, Conversations)
    assert rollouts.turn[2].tolist() == made.turn[2].tolist()
    assert rollouts.rows[1] == {"answer": "1", "environment_reward": 0.5}


def changed_prompt(samples: Prompts) -> Prompts:
    return replace(samples, ids=Packed(samples.ids.values + 1, samples.ids.offsets))


@pytest.mark.parametrize(
    ("role", "version", "changes", "sampling"),
    [
        ("teacher", 7, lambda samples: samples, SAMPLING),
        ("rollout", 8, lambda samples: samples, SAMPLING),
        ("rollout", 7, changed_prompt, SAMPLING),
        ("rollout", 7, lambda samples: replace(samples, keys=samples.keys + np.array([0, 9, 0])), SAMPLING),
        ("rollout", 7, lambda samples: replace(samples, keys=samples.keys + np.array([0, 0, 2])), SAMPLING),
        ("rollout", 7, lambda samples: samples, replace(SAMPLING, temperature=0.0)),
        ("rollout", 7, lambda samples: samples, replace(SAMPLING, max_tokens=5)),
    ],
)
def test_another_response_is_not_found(
    role: str, version: int, changes: Callable[[Prompts], Prompts], sampling: Sampling, tmp_path: Path
) -> None:
    journal_at(tmp_path).add(rollouts_of(), SAMPLES, SAMPLING)
    assert found(journal_at(tmp_path))[0] == [0, 1, 2, 3, 4, 5]
    assert found(journal_at(tmp_path, role, version), changes(SAMPLES), sampling) == ([], None)


def test_another_image_under_the_same_text_is_generated_anew(tmp_path: Path) -> None:
    images = [[Image(b"first", 4, 4)], [], [Image(b"third", 4, 4)]]
    given = replace(GIVEN, images=pack_images(images))
    journal_at(tmp_path).add(rollouts_of(given), given.repeat(2), SAMPLING)
    assert b"third" not in only_file(tmp_path).read_bytes()
    rows, rollouts = found(journal_at(tmp_path), given.repeat(2))
    assert rows == [0, 1, 2, 3, 4, 5]
    assert [images_of(rollouts.images, row) for row in rows] == [tuple(images[row // 2]) for row in rows]
    other = replace(GIVEN, images=pack_images([*images[:2], [Image(b"THIRD", 4, 4)]]))
    assert found(journal_at(tmp_path), other.repeat(2))[0] == [0, 1, 2, 3]


def test_a_file_that_is_cut_off_loses_only_its_last_record(tmp_path: Path) -> None:
    records = journal_at(tmp_path)
    records.add(rollouts_of().take(np.arange(2)), SAMPLES.take(np.arange(2)), SAMPLING)
    first = len(only_file(tmp_path).read_bytes())
    records.add(rollouts_of().take(np.arange(2, 6)), SAMPLES.take(np.arange(2, 6)), SAMPLING)
    content = only_file(tmp_path).read_bytes()
    for size in [*range(first, first + 100, 9), *range(first + 100, len(content), 499), len(content) - 1]:
        only_file(tmp_path).write_bytes(content[:size])
        rows, rollouts = found(journal_at(tmp_path))
        assert rows == [0, 1], size
        assert_same(rollouts, rollouts_of().take(np.arange(2)))


def test_records_are_read_once(tmp_path: Path) -> None:
    """A journal that is asked again reads only what was added: here the first header is destroyed in between."""
    records, reader = journal_at(tmp_path), journal_at(tmp_path)
    records.add(rollouts_of().take(np.arange(2)), SAMPLES.take(np.arange(2)), SAMPLING)
    assert found(reader)[0] == [0, 1]
    with only_file(tmp_path).open("r+b") as file:
        file.write(b"\0" * 8)
    records.add(rollouts_of().take(np.arange(2, 6)), SAMPLES.take(np.arange(2, 6)), SAMPLING)
    assert found(reader)[0] == [0, 1, 2, 3, 4, 5]
    assert found(journal_at(tmp_path))[0] == []


def test_a_record_with_a_flipped_bit_is_missing(tmp_path: Path) -> None:
    records = journal_at(tmp_path)
    records.add(rollouts_of().take(np.arange(2)), SAMPLES.take(np.arange(2)), SAMPLING)
    records.add(rollouts_of().take(np.arange(2, 6)), SAMPLES.take(np.arange(2, 6)), SAMPLING)
    file, draw = only_file(tmp_path), np.random.default_rng(0)
    content = file.read_bytes()
    for place in [*range(0, 60, 3), *draw.integers(60, len(content), 20).tolist()]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(draw.integers(8))
        file.write_bytes(damaged)
        rows, rollouts = found(journal_at(tmp_path))
        assert rows in ([0, 1], [2, 3, 4, 5], []), place
        if rows:
            assert_same(rollouts, rollouts_of().take(np.array(rows)))


def test_files_without_records_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "step-000007"
    folder.mkdir()
    for number, content in enumerate((b"", b"\0" * 1000, bytes(range(256)) * 9)):
        (folder / f"rollout-{number}").write_bytes(content)
    assert found(journal_at(tmp_path)) == ([], None)


def test_a_conversation_that_is_not_done_is_never_resumed_from_a_record(tmp_path: Path) -> None:
    """A record of a stranger could have a harmful pickle as its environment."""
    samples = prompts((3, 3), step=4).repeat(2)
    journal_at(tmp_path).add(conversations(2, b"a pickle"), samples, SAMPLING)
    assert found(journal_at(tmp_path), samples) == ([], None)


def test_records_are_filed_by_the_first_step_that_can_train_on_them(tmp_path: Path) -> None:
    """Version 5 generates step 7 ahead, and version 9 finishes a sample of step 7."""
    for version in (5, 9):
        journal_at(journal_folder(tmp_path), version=version).add(rollouts_of(version=version), SAMPLES, SAMPLING)
    assert sorted(each.name for each in journal_folder(tmp_path).iterdir()) == ["step-000007", "step-000009"]
    remove_records(tmp_path, before=8)
    assert found(journal_at(journal_folder(tmp_path), version=5)) == ([], None)
    assert found(journal_at(journal_folder(tmp_path), version=9))[0] == [0, 1, 2, 3, 4, 5]


def test_samples_of_two_steps_are_in_the_files_of_both(tmp_path: Path) -> None:
    given = Prompts.concatenate([prompts((3, 2), step=7), prompts((4,), step=8)])
    journal_at(tmp_path).add(rollouts_of(given), given.repeat(2), SAMPLING)
    assert [file.parent.name for file in sorted(tmp_path.glob("*/*"))] == ["step-000007", "step-000008"]
    rows, rollouts = found(journal_at(tmp_path), given.repeat(2))
    assert rows == [0, 1, 2, 3, 4, 5]
    assert_same(rollouts, rollouts_of(given))


def test_another_experiment_starts_with_an_empty_journal(tmp_path: Path) -> None:
    open_journal(tmp_path, {"seed": 1})
    journal_at(journal_folder(tmp_path)).add(rollouts_of(), SAMPLES, SAMPLING)
    open_journal(tmp_path, {"seed": 1})
    assert found(journal_at(journal_folder(tmp_path)))[0] == [0, 1, 2, 3, 4, 5]
    open_journal(tmp_path, {"seed": 2})
    assert found(journal_at(journal_folder(tmp_path))) == ([], None)
    (journal_folder(tmp_path) / "experiment.json").write_bytes(b"\xff")
    open_journal(tmp_path, {"seed": 2})
    assert (journal_folder(tmp_path) / "experiment.json").read_text() == '{"seed": 2}'


@pytest.mark.parametrize(
    ("override", "stays"),
    [
        ("seed=7", False),
        ("data.batch_size=4", False),
        ("graph.rollouts.temperature=0.5", False),
        ("graph.update.clip_eps=0.3", False),
        ("roles.rollout.colocate=[]", True),
        ("checkpoints.every=3", True),
        ("max_restarts=0", True),
        ("trackers=[tensorboard]", True),
    ],
)
def test_what_the_recipe_trains_decides_whether_records_stay(override: str, stays: bool, tmp_path: Path) -> None:
    open_journal(tmp_path, experiment_of(load("recipe=fake", config_dir=CONFIG_DIR)))
    journal_at(journal_folder(tmp_path)).add(rollouts_of(), SAMPLES, SAMPLING)
    open_journal(tmp_path, experiment_of(load("recipe=fake", override, config_dir=CONFIG_DIR)))
    assert bool(found(journal_at(journal_folder(tmp_path)))[0]) == stays


def test_a_disk_that_is_full_for_a_while_costs_only_some_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, opened = journal_at(tmp_path), Path.open

    def half_written(path: Path, mode: str) -> Any:
        with opened(path, mode) as file:
            file.write(b"half of a header")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", half_written)
        records.add(rollouts_of().take(np.arange(2)), SAMPLES.take(np.arange(2)), SAMPLING)
    records.add(rollouts_of().take(np.arange(2, 6)), SAMPLES.take(np.arange(2, 6)), SAMPLING)
    assert found(journal_at(tmp_path))[0] == [2, 3, 4, 5]


def engine_at(folder: Path, version: int = 7) -> TransformersEngine:
    """Return an engine that decodes one prompt at a time."""
    built = TransformersEngine(replace(spec("rollout", micro_batch_tokens=5), journal=folder))
    built.load_weights(built._model.state_dict().items(), version)
    return built


def test_an_engine_decodes_only_the_batches_that_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is killed in its third batch. Another one decodes that batch, and a third one none."""
    num_decoded, decode = 0, decoding.decode

    def decode_two_batches(*arguments: Any, **named: Any) -> Any:
        nonlocal num_decoded
        if num_decoded == 2:
            raise KeyboardInterrupt
        num_decoded += 1
        return decode(*arguments, **named)

    expected = engine_at(tmp_path / "undisturbed").generate(GIVEN, SAMPLING)
    monkeypatch.setattr(transformers, "decode", decode_two_batches)
    with pytest.raises(KeyboardInterrupt):
        engine_at(tmp_path / "killed").generate(GIVEN, SAMPLING)
    for num_missing in (1, 0):
        num_decoded = 0
        assert_same(engine_at(tmp_path / "killed").generate(GIVEN, SAMPLING), expected)
        assert num_decoded == num_missing


def test_a_session_generates_only_what_is_not_recorded(tmp_path: Path) -> None:
    first, second = WritingEngine(spec("rollout")), WritingEngine(spec("rollout"))
    for engine in (first, second):
        engine.journal = journal_at(tmp_path, version=0)
    first.begin_session(GIVEN, SAMPLING)
    first.advance(pack_rows([1, 4]), 1)
    rollouts = []
    for engine in (WritingEngine(spec("rollout")), second):
        engine.begin_session(GIVEN, SAMPLING)
        engine.advance(pack_rows(range(6)), 6)
        rollouts.append(engine.finish_session())
    expected, resumed = rollouts
    assert expected is not None
    assert resumed is not None
    assert_same(resumed, expected)
    assert [len(given) for given in second.given] == [4]


def test_a_session_reports_recorded_rows_with_their_lengths(tmp_path: Path) -> None:
    first, second = WritingEngine(spec("rollout")), WritingEngine(spec("rollout"))
    for engine in (first, second):
        engine.journal = journal_at(tmp_path, version=0)
        engine.begin_session(GIVEN, SAMPLING)
    reported = first.advance(pack_rows([0, 3]), 1)
    second.begin_session(GIVEN, SAMPLING)
    assert second.advance(pack_rows([0, 3]), 1) == replace(reported, decode_steps=0)
    assert second.given == []
    taken = second.take_rollouts(pack_rows([3]))
    assert taken.keys.tolist() == SAMPLES.keys[[3]].tolist()
