"""Additions, made from a seed: the task that a tiny model learns on a laptop."""

import hashlib
import random
from typing import Literal

Row = dict[str, str]


def additions(split: Literal["train", "test"], max_operand: int, num_rows: int, seed: int = 0) -> list[Row]:
    """``num_rows`` different sums of two numbers up to ``max_operand``, as prompt, answer and response.

    Every tenth sum, chosen by a hash, belongs to ``test``, in both orders of its operands: the splits share nothing.
    """
    rows = [
        {"prompt": f"{left}+{right}=", "answer": str(left + right), "response": str(left + right)}
        for left in range(max_operand + 1)
        for right in range(max_operand + 1)
        if _is_test(left, right, seed) == (split == "test")
    ]
    random.Random(seed).shuffle(rows)
    return rows[:num_rows]


def _is_test(left: int, right: int, seed: int) -> bool:
    text = f"{seed},{min(left, right)},{max(left, right)}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] < 26
