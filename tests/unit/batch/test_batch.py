import numpy as np

from rlflow.batch import Packed
from tests.helpers import minibatch, prompts, sequences


def test_rows_keep_their_values() -> None:
    packed = Packed.from_rows([[1, 2], [], [3]], np.int32)
    assert [list(packed[row]) for row in range(len(packed))] == [[1, 2], [], [3]]
    assert list(packed.lengths) == [2, 0, 1]
    assert [list(row) for row in (packed.take(np.array([2, 0]))[0], packed.take(np.array([2, 0]))[1])] == [[3], [1, 2]]


def test_no_rows() -> None:
    assert len(Packed.from_rows([], np.int32)) == 0


def test_repeat_counts_samples_and_leaves_the_prompts_alone() -> None:
    before = prompts()
    samples = before.repeat(2)
    assert samples.keys.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1]]
    assert before.keys[:, 2].tolist() == [0, 0, 0]
    assert list(samples.ids[3]) == list(before.ids[1])


def test_take_of_a_minibatch_takes_its_columns() -> None:
    whole = sequences([2, 3], [[2, 1], [3]])
    batch = minibatch(whole, advantages=np.arange(6.0))
    taken = batch.take(np.array([2, 0]))
    assert list(taken.columns["advantages"].values) == [3, 4, 5, 0, 1]
    assert taken.keys.tolist() == [[0, 1, 0], [0, 0, 0]]
