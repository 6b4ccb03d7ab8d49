"""Conversations that are made: what they show is true, and the splits share nothing."""

import re

import numpy as np
import pytest

from rlflow.data.dialogues import examples, guesses, products
from rlflow.environments.base import load_environment


@pytest.mark.parametrize("rows", [products, guesses])
def test_splits_share_no_prompt(rows: object) -> None:
    assert callable(rows)
    train, test = ({row["prompt"] for row in rows(split)} for split in ("train", "test"))
    assert not train & test
    assert 0.05 < len(test) / (len(train) + len(test)) < 0.15
    with pytest.raises(ValueError, match="expected the split train or test, got 'both'"):
        rows("both")


def test_a_product_is_in_the_split_of_its_factors() -> None:
    prompts = {row["prompt"] for row in products("test")}
    assert all("{1}*{0}:".format(*prompt[:-1].split("*")) in prompts for prompt in prompts)


@pytest.mark.slow
def test_examples_show_what_the_environments_would_say() -> None:
    with_tool, played = [], []
    for row in examples("train"):
        prompt, response = row["prompt"], row["response"]
        if prompt.endswith(":"):
            left, right = map(int, prompt[:-1].split("*"))
            call = re.fullmatch(rf"calc\({left}\*{right}\)(\d+)=\1", response)
            assert call or response == f"={left * right}"
            with_tool.append(bool(call))
            continue
        game, said = load_environment("guessing", {}), re.findall(r"(\d)\.([<>]?)", response)
        assert "".join(f"{guess}.{answer}" for guess, answer in said) == response
        assert 1 <= len(said) <= 3
        # The number is not told, and these answers are those to one of the seven.
        fitting = []
        for number in "1234567":
            game.reset({"number": number})
            answers = [game.step(guess).text for guess, _ in said]
            fitting.append(answers[:-1] == [answer for _, answer in said[:-1]])
        assert any(fitting)
        played += [said[0][0] != said[1][0]] if len(said) > 1 else []
    assert np.mean(with_tool) == pytest.approx(0.3, abs=0.03)
    assert np.mean(played) == pytest.approx(0.4, abs=0.03)
