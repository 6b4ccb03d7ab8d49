"""A teacher behind a server: its words are those of the same model in a role, and what it cannot serve is refused."""

from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Packed
from rlflow.batch.top_logprobs import find_words, loss_values
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, GraphError, RecipeError, UserError
from rlflow.nodes.distillation import ScoreTopLogprobs
from rlflow.nodes.teacher_server import ServedTopLogprobs
from tests.helpers import load, rollouts, sequences, spec
from tests.unit.rewards.services import Service, serving

GIVEN = replace(rollouts(sequences([3, 2, 4], [[2, 5], [1, 4], [3, 3]])), temperature=1.0)
TEXTS = ["".join(f"<{token}>" for token in GIVEN.response_ids[row]) for row in range(len(GIVEN))]
# One for all threads of a server: the seed of random weights is a process's own.
MODEL, LOCK = TransformersEngine(spec()), Lock()
Answer = Callable[[Service, dict[str, Any]], Any]


def answer(service: Service, body: dict[str, Any]) -> Any:
    """Answer as a server of vLLM does that has the model of these tests."""
    if "tokens" in body:
        return {"prompt": "".join(f"<{token}>" for token in body["tokens"])}
    ids, count = body["prompt"], body["prompt_logprobs"]
    text = replace(
        GIVEN.take(np.array([0])),
        prompt_ids=Packed.from_rows([ids[:1]], np.int32),
        response_ids=Packed.from_rows([ids[1:]], np.int32),
    )
    with LOCK:
        top = MODEL.top_logprobs(text, 1.0, 13).values
    words = find_words({"": top})
    assert words is not None
    places: list[dict[str, Any] | None] = [None]
    for token, numbers, logprobs in zip(ids[1:], words.tolist(), loss_values(top.values).tolist(), strict=True):
        entries = {
            str(word): {"logprob": logprob, "rank": rank + 1, "decoded_token": f"<{word}>"}
            for rank, (word, logprob) in enumerate(zip(numbers, logprobs, strict=True))
            if rank < count or word == token
        }
        # The token of the text comes first, whatever its rank.
        places.append({str(token): entries.pop(str(token)), **entries})
    return {"choices": [{"prompt_logprobs": places}]}


def node_of(service: Service, **options: Any) -> ServedTopLogprobs:
    return ServedTopLogprobs(**{"url": f"{service.url}/v1", "model": "teacher", "count": 4, **options})


def test_the_words_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    given = replace(GIVEN, texts=TEXTS)
    with serving(answer) as service:
        ours = node_of(service).run(given)
    expected = ScoreTopLogprobs(count=4).run(MODEL, given)
    np.testing.assert_array_equal(find_words({"": ours.values}), find_words({"": expected.values}))
    np.testing.assert_allclose(loss_values(ours.values.values), loss_values(expected.values.values), atol=1e-5)
    assert {path for path, _, _ in service.asked} == {"/v1/completions", "/detokenize"}
    assert {key for _, _, key in service.asked} == {"Bearer secret"}


def test_it_is_asked_for_its_own_rows() -> None:
    rows = [{"source": source} for source in "aabbcc"]
    with serving(answer) as service:
        ours = node_of(service, rows={"source": "b"}).run(replace(GIVEN, texts=TEXTS, rows=rows))
    assert ours.is_scored.tolist() == [False, False, True, True, False, False]
    assert len(service.asked) == 1 + 2


@pytest.mark.parametrize(
    ("texts", "answers", "error", "fact"),
    [
        (["other"] * 6, answer, RecipeError, "the server's model reads '<.*>' in the tokens of 'other'"),
        (TEXTS, lambda *_: 404, EngineError, r"The teacher's server does not answer: .*404 Not Found; 1 try"),
        (
            TEXTS,
            lambda service, body: answer(service, body) if "tokens" in body else {"choices": [{"text": "x"}]},
            EngineError,
            r"expected prompt_logprobs for 5 tokens from http.*Is it a server of vLLM\?",
        ),
    ],
)
def test_what_a_server_does_wrong(texts: list[str], answers: Answer, error: type[UserError], fact: str) -> None:
    with serving(answers) as service, pytest.raises(error, match=fact):
        node_of(service).run(replace(GIVEN, texts=texts))


def test_a_server_has_one_temperature() -> None:
    teacher = "{node: served_top_logprobs, url: 'http://teacher:8000/v1', model: large}"
    changes = ("~models.teacher", "~roles.teacher", "~graph.teacher", f"+graph.teacher={teacher}")
    recipe = load("recipe=distill_top_tiny", *changes)
    assert "teacher" not in rlflow.compile(recipe, "local").roles
    with pytest.raises(GraphError, match=r"^graph\.rollouts\.temperature: is 0\.7, and a server returns logprobs at"):
        rlflow.compile(load("recipe=distill_top_tiny", *changes, "graph.rollouts.temperature=0.7"), "local")


def test_a_key_is_not_shown() -> None:
    with pytest.raises(RecipeError, match=r"^api_key: expected the name of an environment variable") as raised:
        ServedTopLogprobs(url="http://teacher:8000/v1", model="large", api_key="sk-123").check(frozenset())
    assert "sk-123" not in str(raised.value)
