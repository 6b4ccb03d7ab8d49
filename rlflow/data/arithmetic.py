"""Generated additions, the task that a tiny model learns on a laptop."""

import hashlib
import random
from collections.abc import Sequence

Row = dict[str, str]


def additions(split: str, digits: int, seed: int = 0) -> list[Row]:
    """Return all sums of two numbers with ``digits`` digits, with leading zeros, as prompt and answer.

    Every tenth sum, chosen by a hash, belongs to ``test`` in both orders of its operands, so the splits share no sums.
    Raises ValueError for another split, and for other than 1 to 3 digits: four have 100 million sums.
    """
    if split not in ("train", "test"):
        raise ValueError(f"expected the split train or test, got '{split}'")
    if digits not in (1, 2, 3):
        raise ValueError(f"expected 1, 2 or 3 digits, got {digits!r}")
    numbers = range(10**digits)
    rows = [
        {"prompt": f"{left:0{digits}}+{right:0{digits}}=", "answer": f"{left + right:0{digits + 1}}"}
        for left in numbers
        for right in numbers
        if _is_test(left, right, seed) == (split == "test")
    ]
    random.Random(seed).shuffle(rows)
    return rows


def mixed_additions(split: str, digits: Sequence[int], rows: int, seed: int = 0) -> list[dict[str, str | int]]:
    """Draw so many sums of numbers with these ``digits``, equally many of each; their number is a column.

    The answer begins with its units. Splits share no sums. Short sums repeat: there are 100 of single digits.
    """
    draw = random.Random(f"{seed} {split}")
    sums: list[dict[str, str | int]] = []
    while len(sums) < rows:
        width = digits[len(sums) % len(digits)]
        left, right = draw.randrange(10**width), draw.randrange(10**width)
        if _is_test(left, right, seed) == (split == "test"):
            prompt = f"{left:0{width}}+{right:0{width}}="
            sums.append({"prompt": prompt, "answer": f"{left + right:0{width + 1}}"[::-1], "digits": width})
    return sums


def addition_pairs(split: str, digits: int, seed: int = 0) -> list[Row]:
    """Return the same sums with the right answer as the chosen response and one with a wrong digit as the rejected."""
    draw = random.Random(seed)
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": _change_one_digit(row["answer"], draw)}
        for row in additions(split, digits, seed)
    ]


def _change_one_digit(number: str, draw: random.Random) -> str:
    position, offset = draw.randrange(len(number)), draw.randrange(1, 10)
    return f"{number[:position]}{(int(number[position]) + offset) % 10}{number[position + 1 :]}"


def _is_test(left: int, right: int, seed: int) -> bool:
    text = f"{seed},{min(left, right)},{max(left, right)}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] < 26
