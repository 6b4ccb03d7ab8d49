"""Conversations with a calculator and in a guessing game, made from a seed: what tiny models learn on a laptop.

A product is asked for as ``37*84:``, and answered as ``=3108``; the tool is called as ``calc(37*84)``. ``13?`` asks for
a number from 131 to 137, of which guesses as ``134.`` are answered by ``<`` or ``>``.
"""

import hashlib
import random

Row = dict[str, str]

# All products of these have four digits.
_FACTORS = range(32, 100)
_TENS = range(10, 100)
_DIGITS = range(1, 8)
_GUESSES = 3
# Of the examples, those that show the tool.
_WITH_TOOL = 0.3


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
    guesses that heed no answer."""
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
    said = ""
    for turn in range(_GUESSES):
        guess = f"{row['prompt'][:-1]}{draw.choice(_DIGITS)}"
        said += f"{guess}."
        if guess == row["number"] or turn == _GUESSES - 1:
            break
        said += ">" if row["number"] > guess else "<"
    return said


def _is_in(split: str, text: str, seed: int) -> bool:
    if split not in ("train", "test"):
        raise ValueError(f"no split '{split}', only train and test")
    is_test = hashlib.blake2b(f"{seed},{text}".encode(), digest_size=8).digest()[0] < 26
    return is_test == (split == "test")
