import json
from pathlib import Path

import pytest

from rlflow.errors import RecipeError
from rlflow.resources.time.lengths import past_lengths


def test_lengths_between_the_quantiles_of_a_step(tmp_path: Path) -> None:
    """Linear between (10, 10), (50, 50), (90, 90) and (100, 200); what lies below p10 counts as p10."""
    step = {f"rollouts/length_p{n}": n for n in (10, 50, 90)} | {"step": 1, "rollouts/length_max": 200}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps({"step": 1, "evaluation/reward": 1}))
    assert past_lengths(str(tmp_path), "x") == (10, 15, 25, 35, 45, 55, 65, 75, 85, 200)


@pytest.mark.parametrize(("content", "said"), [(None, "no metrics.jsonl"), ("{", "no resp"), ("{}", "no resp")])
def test_a_folder_that_is_no_run(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(RecipeError, match=said) as caught:
        past_lengths(str(tmp_path), "expect.response_tokens")
    assert caught.value.path == "expect.response_tokens"


@pytest.mark.parametrize(
    "junk",
    ["{", "[1, 2]", "3", '"x"', '{"rollouts/length_p50": "x"}', '{"a/length_p50": 3}', "[" * 100_000, '{"step": true}'],
)
def test_a_line_that_is_no_step_is_named(tmp_path: Path, junk: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{junk}\n')
    with pytest.raises(RecipeError) as raised:
        past_lengths(str(tmp_path), "expect.response_tokens")
    file = tmp_path / "metrics.jsonl"
    assert str(raised.value) == (
        f"expect.response_tokens: line 2 of '{file}' does not hold the metrics of a step.\n"
        f"  Fix: remove line 2 of '{file}', or name another run."
    )


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecipeError, match=r"no metrics\.jsonl of a run"):
        past_lengths(str(tmp_path), "expect.response_tokens")
