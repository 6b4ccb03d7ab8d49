"""Conversations with a calculator and in a guessing game, made from a seed: what tiny models learn on a laptop.

A product is asked for as ``37*84:``, and answered as ``=3108``; the tool is called as ``calc(37*84)``. ``13?`` asks for
a number from 131 to 133, of which guesses as ``132.`` are answered by ``<`` or ``>``.
"""

import hashlib
import random

Row = dict[str, str]

# All products of these have four digits.
_FACTORS = range(32, 100)
_TENS = range(10, 100)
_DIGITS = "123"
# Of the products, those that show the tool; of the games, those in which the second guess is the first one.
_WITH_TOOL, _STUBBORN = 0.3, 0.5


def products(split: str, seed: int = 0) -> list[Row]:
    """All products of two numbers from 32 to 99, as prompt and answer. Every tenth, by a hash, belongs to ``test``, in
    both orders of its factors."""
    rows = [
        {"prompt": f"{left}*{right}:", "answer": str(left * right)}
        for left in _FACTORS
        for right in _FACTORS
        if _is_in(split, f"{min(left, right)},{max(left, right)}", seed)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def guesses(split: str, seed: int = 0) -> list[Row]:
    """All tens with each of their numbers, as prompt and number. Of the tens every tenth, by a hash, is in ``test``."""
    rows = [
        {"prompt": f"{tens}?", "number": f"{tens}{digit}"}
        for tens in _TENS
        if _is_in(split, str(tens), seed)
        for digit in _DIGITS
    ]
    random.Random(seed).shuffle(rows)
    return rows


def examples(split: str, seed: int = 0) -> list[Row]:
    """Both as a beginner does them, as prompt and response with what is answered: most products without the tool, and
    guesses that heed no answer, often the same again."""
    draw = random.Random(seed)
    rows = [{"prompt": row["prompt"], "response": _worked_out(row, draw)} for row in products(split, seed)]
    # As often as products.
    games = draw.choices(guesses(split, seed), k=len(rows))
    rows += [{"prompt": row["prompt"], "response": _guessed(row, draw)} for row in games]
    draw.shuffle(rows)
    return rows


def _worked_out(row: Row, draw: random.Random) -> str:
    answer = row["answer"]
    return f"calc({row['prompt'][:-1]}){answer}={answer}" if draw.random() < _WITH_TOOL else f"={answer}"


def _guessed(row: Row, draw: random.Random) -> str:
    tens, number = row["prompt"][:-1], row["number"]
    first, second = (tens + draw.choice(_DIGITS) for _ in range(2))
    if first == number:
        return f"{first}."
    answer = ">" if number > first else "<"
    return f"{first}.{answer}{first if draw.random() < _STUBBORN else second}."


def _is_in(split: str, text: str, seed: int) -> bool:
    if split not in ("train", "test"):
        raise ValueError(f"no split '{split}', only train and test")
    is_test = hashlib.blake2b(f"{seed},{text}".encode(), digest_size=8).digest()[0] < 26
    return is_test == (split == "test")
