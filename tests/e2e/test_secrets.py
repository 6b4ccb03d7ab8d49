"""Tokens of the environment are in nothing that a run writes or shows."""

from pathlib import Path

import pytest

from tests.conftest import FAKE, Typed

TOKENS = {
    "HF_TOKEN": "hf_marked5309a",
    "WANDB_API_KEY": "wandb_marked5309b",
    "OPENAI_API_KEY": "sk-marked5309c",
    "AWS_SECRET_ACCESS_KEY": "aws_marked5309d",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def tokens_in(text: str) -> list[str]:
    return [name for name, value in TOKENS.items() if value in text]


@pytest.mark.slow
def test_no_file_of_a_run_has_a_token(place: Path, typed: Typed) -> None:
    code, out, errors = typed(*FAKE, "steps=2")
    assert code == 0, errors
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"plan.json", "recipe.yaml", "metrics.jsonl"} <= {path.name for path in files}
    assert tokens_in(out + errors) == []
    assert [path for path in files if tokens_in(path.read_bytes().decode(errors="replace"))] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("data.source=nowhere.jsonl",),
        ("name=${oc.env:HF_TOKEN}", "dry_run=true"),
        ("data.source=${oc.env:HF_TOKEN}",),
        ("cluster=${oc.env:HF_TOKEN}", "dry_run=true"),
        ("recipe=${oc.env:HF_TOKEN}", "dry_run=true"),
    ],
)
def test_no_error_has_a_token(words: tuple[str, ...], place: Path, typed: Typed) -> None:
    code, out, errors = typed(*FAKE, *words)
    assert code == 2
    assert tokens_in(out + errors) == []
