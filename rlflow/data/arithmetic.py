"""Additions, made from a seed: the task that a tiny model learns on a laptop."""

import hashlib
import random

Row = dict[str, str]


def additions(split: str, digits: int, seed: int = 0) -> list[Row]:
    """All sums of two numbers of ``digits`` digits, leading zeros written, as prompt, answer and response.

    Every tenth sum, chosen by a hash, belongs to ``test``, in both orders of its operands: the splits share nothing.
    """
    if split not in ("train", "test"):
        raise ValueError(f"no split '{split}', only train and test")
    numbers = range(10**digits)
    rows = [
        {"prompt": f"{left:0{digits}}+{right:0{digits}}=", "answer": f"{left + right:0{digits + 1}}"}
        for left in numbers
        for right in numbers
        if _is_test(left, right, seed) == (split == "test")
    ]
    random.Random(seed).shuffle(rows)
    return rows


def addition_pairs(split: str, digits: int, seed: int = 0) -> list[Row]:
    """The same sums as prompt, chosen and rejected response: the right one, and one with another digit in one place."""
    draw = random.Random(seed)
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": _misprinted(row["answer"], draw)}
        for row in additions(split, digits, seed)
    ]


def _misprinted(number: str, draw: random.Random) -> str:
    place, further = draw.randrange(len(number)), draw.randrange(1, 10)
    return f"{number[:place]}{(int(number[place]) + further) % 10}{number[place + 1 :]}"


def _is_test(left: int, right: int, seed: int) -> bool:
    text = f"{seed},{min(left, right)},{max(left, right)}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] < 26
