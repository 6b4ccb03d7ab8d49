import pytest

from rlflow.errors import PlacementError, RecipeError, UserError, below, did_you_mean, first_line


def test_form_of_a_message() -> None:
    error = PlacementError("roles.rollout", "no host has 12 GPUs", known=["a", "b"], free="8", fix="ask for 8")
    assert str(error) == "roles.rollout: no host has 12 GPUs.\n  Known: a, b.\n  Free: 8.\n  Fix: ask for 8."


def test_a_question_keeps_its_mark() -> None:
    assert str(RecipeError("a", "b", fix=did_you_mean("tork", ["torch"]))) == "a: b.\n  Fix: did you mean 'torch'?"


def test_did_you_mean_keeps_silent_when_nothing_is_near() -> None:
    assert did_you_mean("xyz", ["torch"]) is None


def test_below_puts_the_place_in_front() -> None:
    with pytest.raises(UserError, match=r"^graph\.rewards\.function: is missing\.$"), below("graph.rewards"):
        raise RecipeError("function", "is missing")


def test_an_error_without_a_message_is_named() -> None:
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("one.\ntwo")) == "ValueError: one"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("a\u202eb\u200bc", "a\\u202eb\\u200bc"),
        ("\ud800", "\\ud800"),
        ("a\n\tb ü 中", "a\n\tb ü 中"),
        ("x" * 10**6, "x" * 10_000 + " [...]"),
    ],
    ids=["escapes", "invisible", "surrogate", "text", "long"],
)
def test_a_part_of_an_error_shows_quoted_text_as_it_is(text: str, shown: str) -> None:
    error = RecipeError(text, text, known=[text], free=text, fix=text)
    assert (error.path, error.fact, *error.notes.values()) == (shown,) * 5
