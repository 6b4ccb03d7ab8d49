"""Supervised training on all turns of the assistant: which tokens there are, and which are learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Metrics, Minibatch
from rlflow.data.source import DataSource
from rlflow.engines.base import TokenLoss
from rlflow.engines.fake import FakeEngine
from rlflow.errors import RecipeError
from rlflow.nodes.sft import SftUpdate
from tests.helpers import load, spec
from tests.unit.data.test_source_messages import AGAIN, ASSISTANT, LAST, SYSTEM, TOKENIZER, USER, opened

END = TOKENIZER.eos_token
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | length }}={{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}" + END + "{% endif %}+{% endfor %}{% if add_generation_prompt %}9={% endif %}"
)
TALK = [SYSTEM, USER, ASSISTANT, AGAIN, LAST]


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATE)


def text_of(ids: Any) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False)).replace(END, "|").replace(" ", "")


def all_turns(path: Path, *rows: dict[str, Any]) -> DataSource:
    return opened(path, list(rows), train_on="all", batch_size=len(rows))


@pytest.mark.usefixtures("template")
def test_the_assistants_turns_and_their_ends_are_learned(tmp_path: Path) -> None:
    source = all_turns(
        tmp_path, {"messages": TALK}, {"messages": TALK[1:3]}, {"messages": [USER, {**ASSISTANT, "content": "3"}]}
    )
    examples = source.examples(0)
    seen = set()
    for row in range(3):
        ids, own = examples.response_ids[row], examples.own_tokens()[row]
        seen.add((text_of(examples.prompt_ids[row]), text_of(ids), text_of(ids[own])))
    assert seen == {
        ("6=77+4=1+1+9=", "2|+4=2+2+9=4|", "2|4|"),
        ("4=1+1+9=", "2|", "2|"),
        ("4=1+1+9=", "3|", "3|"),
    }


@pytest.mark.usefixtures("template")
def test_the_last_turn_is_the_one_that_is_learned_alone(tmp_path: Path) -> None:
    every, last = all_turns(tmp_path, {"messages": TALK}), opened(tmp_path, [{"messages": TALK}])
    whole, alone = every.examples(0), last.examples(0)
    assert np.concatenate([whole.prompt_ids[0], whole.response_ids[0]]).tolist() == (
        np.concatenate([alone.prompt_ids[0], alone.response_ids[0]]).tolist()
    )


@pytest.mark.usefixtures("template")
def test_only_learned_tokens_have_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = all_turns(tmp_path, {"messages": TALK}).examples(0)
    weights: list[Any] = []
    update = FakeEngine.update

    def noted(self: FakeEngine, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        weights.extend(minibatch.weights.values)
        return update(self, minibatch, loss)

    monkeypatch.setattr(FakeEngine, "update", noted)
    SftUpdate().run(FakeEngine(spec()), examples)
    assert weights == [0.25 if own else 0 for own in examples.own_tokens().values]


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    """The plain template of these tests writes no end token."""
    with pytest.raises(RecipeError, match=r"row 0 of .* has turns that the chat template changes once others follow"):
        all_turns(tmp_path, {"messages": TALK})


def test_without_examples_there_is_nothing_to_choose() -> None:
    with pytest.raises(RecipeError, match=r"^data\.train_on: chooses what supervised training learns"):
        rlflow.compile(load("recipe=grpo_tiny", "data.train_on=all"), "local")


def test_the_row_of_a_turn_that_a_template_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% for m in messages %}{% if m['content'] == '8' %}{{ raise_exception('no 8') }}{% endif %}{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refusing + TEMPLATE)
    bad = [*TALK[:3], {**AGAIN, "content": "8"}, LAST]
    with pytest.raises(RecipeError, match=r"chat template fails for row 1 \(TemplateError: no 8\) of "):
        all_turns(tmp_path, {"messages": TALK}, {"messages": bad})
