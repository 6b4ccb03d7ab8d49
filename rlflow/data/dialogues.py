"""Conversations with a calculator and in a guessing game, made from a seed: what tiny models learn on a laptop.

A product is asked for as ``37*84:``, and answered as ``=3108``; the tool is called as ``calc(37*84)``. ``13?`` is the
13th game: a number from 1 to 7, of which guesses as ``4.`` are answered by ``<`` or ``>``.
"""

import hashlib
import random

Row = dict[str, str]

# All products of these have four digits.
_FACTORS = range(32, 100)
_GAMES = range(10, 100)
_NUMBERS = "1234567"
_GUESSES = 3
# Of the products, those that show the tool; of the games, those in which guesses heed the answers.
_WITH_TOOL, _HEEDING = 0.3, 0.4


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
    """All games with all numbers, as prompt and number. Every tenth game, by a hash, belongs to ``test``."""
    rows = [
        {"prompt": f"{game}?", "number": number}
        for game in _GAMES
        if _is_in(split, str(game), seed)
        for number in _NUMBERS
    ]
    random.Random(seed).shuffle(rows)
    return rows


def examples(split: str, seed: int = 0) -> list[Row]:
    """Both as a beginner does them, as prompt and response with what is answered: most products without the tool, and
    most games with the same guess again and again."""
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
    heeds = draw.random() < _HEEDING
    fitting, said = _NUMBERS, ""
    guess = draw.choice(fitting)
    for _ in range(_GUESSES - 1):
        if guess == row["number"]:
            break
        above = row["number"] > guess
        said += f"{guess}.{'>' if above else '<'}"
        fitting = "".join(number for number in fitting if number != guess and (number > guess) == above)
        guess = draw.choice(fitting) if heeds else guess
    return f"{said}{guess}."


def _is_in(split: str, text: str, seed: int) -> bool:
    if split not in ("train", "test"):
        raise ValueError(f"no split '{split}', only train and test")
    is_test = hashlib.blake2b(f"{seed},{text}".encode(), digest_size=8).digest()[0] < 26
    return is_test == (split == "test")
