"""Tokens of the environment are in nothing that a run writes or shows."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import FAKE, Typed
from tests.unit.agents.agents_of_tests import KeyNoter

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
def test_no_file_of_a_run_with_agents_has_a_key(
    place: Path, typed: Typed, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the environment, nor those of episodes and workers, which exist only in memory."""
    for removal in ("finish.remove_journal", "checkpoint.remove_records"):
        monkeypatch.setattr(f"rlflow.runtime.{removal}", Mock())
    notes = tmp_path_factory.mktemp("keys")
    model = (
        "{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 1,"
        " num_key_value_heads: 1, head_dim: 32, vocab_size: 265, max_position_embeddings: 256}"
    )
    agent = (
        f"{{node: agent, environment: '{KeyNoter.__module__}:KeyNoter', options: {{folder: '{notes}'}}, max_calls: 1,"
        " turn_tokens: 8, max_tokens: 120, group_size: 2, processes: 1}"
    )
    code, out, errors = typed(
        "recipe=dr_grpo_tiny",
        "steps=1",
        "evaluation=null",
        "models.policy={recipe: null, random_weights: true, characters: null, tokenizer: bytes}",
        f"++models.policy.architecture={model}",
        f"++graph.rollouts={agent}",
        "graph.rewards.function=environment",
        "data.batch_size=2",
        "data.max_prompt_tokens=32",
    )
    assert code == 0, errors
    keys = [file.name for file in notes.iterdir() if not file.name.startswith("attempt-")]
    assert len(keys) == 1 + 2 * 4, "a worker, and two attempts of each episode"
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"samples.jsonl", "report.html", "experiment.json"} <= {path.name for path in files}
    assert any("journal" in path.parts and path.name.startswith("rollout-") for path in files)
    contents = {
        "the terminal": out + errors,
        **{str(path): path.read_bytes().decode(errors="replace") for path in files},
    }
    leaks = [name for name, text in contents.items() if tokens_in(text) or any(key in text for key in keys)]
    assert leaks == []


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
