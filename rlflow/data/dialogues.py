"""Generated conversations with a calculator and in a guessing game, which tiny models learn on a laptop.

The prompt ``37*84:`` asks for a product and the answer is ``=3108``; ``calc(37*84)`` calls the tool. The prompt ``13?``
starts game 13 about a number from 1 to 7, in which a guess such as ``4.`` is answered by ``<`` or ``>``.
"""

import hashlib
import random

Row = dict[str, str]

# Factors whose products all have four digits.
_FACTORS = range(32, 100)
_GAMES = range(10, 100)
_NUMBERS = "1234567"
_GUESSES = 3
# The share of example products that use the tool, and of example games whose guesses follow the answers.
_TOOL_SHARE, _GOOD_GUESS_SHARE = 0.3, 0.4


def products(split: str, seed: int = 0) -> list[Row]:
    """Return all products of two numbers from 32 to 99, as prompt and answer.

    Every tenth product, chosen by a hash, belongs to ``test`` in both orders of its factors.
    """
    rows = [
        {"prompt": f"{left}*{right}:", "answer": str(left * right)}
        for left in _FACTORS
        for right in _FACTORS
        if _is_in(split, f"{min(left, right)},{max(left, right)}", seed)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def guesses(split: str, seed: int = 0) -> list[Row]:
    """Return all games with all numbers, as prompt and number. Every tenth game, by a hash, belongs to ``test``."""
    rows = [
        {"prompt": f"{game}?", "number": number}
        for game in _GAMES
        if _is_in(split, str(game), seed)
        for number in _NUMBERS
    ]
    random.Random(seed).shuffle(rows)
    return rows


def examples(split: str, seed: int = 0) -> list[Row]:
    """Return products and games as a beginner does them, as prompt and response.

    Most products do not use the tool, and most games repeat the same guess. Responses contain the answers of the tool
    and the game.
    """
    draw = random.Random(seed)
    rows = [{"prompt": row["prompt"], "response": _product_response(row, draw)} for row in products(split, seed)]
    # There are as many games as products.
    games = draw.choices(guesses(split, seed), k=len(rows))
    rows += [{"prompt": row["prompt"], "response": _game_response(row, draw)} for row in games]
    draw.shuffle(rows)
    return rows


def _product_response(row: Row, draw: random.Random) -> str:
    answer = row["answer"]
    return f"calc({row['prompt'][:-1]}){answer}={answer}" if draw.random() < _TOOL_SHARE else f"={answer}"


def _game_response(row: Row, draw: random.Random) -> str:
    is_good = draw.random() < _GOOD_GUESS_SHARE
    candidates, response = _NUMBERS, ""
    guess = draw.choice(candidates)
    for _ in range(_GUESSES - 1):
        if guess == row["number"]:
            break
        is_higher = row["number"] > guess
        response += f"{guess}.{'>' if is_higher else '<'}"
        candidates = "".join(number for number in candidates if number != guess and (number > guess) == is_higher)
        guess = draw.choice(candidates) if is_good else guess
    return f"{response}{guess}."


def _is_in(split: str, text: str, seed: int) -> bool:
    if split not in ("train", "test"):
        raise ValueError(f"expected the split train or test, got '{split}'")
    is_test = hashlib.blake2b(f"{seed},{text}".encode(), digest_size=8).digest()[0] < 26
    return is_test == (split == "test")
