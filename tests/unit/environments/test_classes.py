"""The environments that recipes may name."""

import pytest

from rlflow.environments.base import Environment, Observation, load_environment
from rlflow.errors import RecipeError


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("calc(12*7)", "84"),
        ("let me see: calc(1/3) or rather calc( (1+2)*-3 )", "-9"),
        ("calc(1/3)", "0.333333"),
        ("calc(0.1+0.2)", "0.3"),
        ("calc(10/4*2)", "5"),
        ("calc(1/0)", "?"),
        ("calc(2**100)", "?"),
        ("calc(__import__('os'))", "?"),
        ("calc('a'*99)", "?"),
        ("calc(True)", "?"),
        ("calc(1+)", "?"),
        ("calc()", "?"),
        (f"calc({'(' * 150}1{')' * 150})", "?"),
        (f"calc({'9*' * 500}9)", "?"),
        (f"calc({'1e300*' * 20}1)", "?"),
    ],
)
def test_the_calculator_works_out_the_last_call(said: str, result: str) -> None:
    assert load_environment("calculator", {}).step(said) == Observation(result)


def test_without_a_call_the_conversation_is_over() -> None:
    assert load_environment("calculator", {}).step("it is 84").done
    assert load_environment("calculator", {"unknown": "error"}).step("calc(x)").text == "error"


def test_the_game_says_which_way() -> None:
    game = load_environment("guessing", {"higher": "more", "lower": "less"})
    game.reset({"number": "17"})
    assert [game.step(text) for text in ("16?", "about 10 or 20", "I give up", "017")] == [
        Observation("more"),
        Observation("less"),
        Observation(""),
        Observation(done=True, reward=1.0),
    ]


class Unfinished(Environment):
    pass


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "calculater",
            {},
            "environment: no environment 'calculater'.\n  Known: calculator, guessing, package.module:name.\n"
            "  Fix: did you mean 'calculator'?",
        ),
        (
            "calculator",
            {"unknwon": "?"},
            "options.unknwon: unknown key.\n  Known: unknown.\n  Fix: did you mean 'unknown'?",
        ),
        (
            "guessing",
            {"higher": 3},
            "options.higher: 3 is not valid: input should be a valid string.\n"
            "  Fix: write a text; quote it if it looks like a number.",
        ),
        (
            "rlflow.batch:Prompts",
            {},
            "environment: 'rlflow.batch:Prompts' is not an Environment.\n"
            "  Fix: derive it from rlflow.environments.base.Environment.",
        ),
        (
            f"{__name__}:Unfinished",
            {},
            f"environment: '{__name__}:Unfinished' has no step.\n  Fix: see docs/environments.md.",
        ),
    ],
)
def test_environments_that_cannot_be_found(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_environment(name, options)
    assert str(caught.value) == message
