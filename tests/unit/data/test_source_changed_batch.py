"""A run that goes on with another batch size takes the rows that come next."""

import numpy as np

from rlflow.batch import Packed
from rlflow.data.source import DataSource
from rlflow.recipe import Data
from tests.helpers import prompts


def source(batch_size: int, resumed_at: tuple[int, int] = (0, 0)) -> DataSource:
    rows = [{"answer": str(row)} for row in range(20)]
    data = Data(source="x:y", batch_size=batch_size, max_prompt_tokens=1)
    ids = Packed.from_rows([np.array([row + 1]) for row in range(20)], np.int32)
    return DataSource(data, 0, rows, ids, ids, {"": prompts()}, resumed_at=resumed_at)


def answers(data: DataSource, *steps: int) -> list[str]:
    return [row["answer"] for step in steps for row in data.prompts(step).rows]


def test_every_row_is_read_exactly_once() -> None:
    straight = answers(source(1), *range(30))
    before, after = source(4), source(2, resumed_at=(3, 12))
    assert answers(before, 0, 1, 2) + answers(after, *range(3, 12)) == straight
    assert after.examples(3).prompt_ids.values.tolist() == after.prompts(3).ids.values.tolist()
