"""Rewards that ask a service: what it says is a number or a failure, and nothing hangs."""

import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from rlflow.rewards import http
from rlflow.rewards.base import Failure, Kind
from rlflow.rewards.functions import judge, remote
from tests.unit.rewards.services import Service, serving

TIMEOUT_S = 0.5


@pytest.fixture(autouse=True)
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FIRST_WAIT_S", 0.01)


def late(service: Service, _: Any) -> Any:
    service.closing.wait(60)
    return {"rewards": [1.0, 2.0]}


def test_remote_asks_about_all_at_once() -> None:
    rows: list[dict[str, Any]] = [{"answer": "a"}, {"answer": {1, 2}}]
    with serving(lambda service, content: {"rewards": [len(text) for text in content["texts"]]}) as service:
        assert remote.reward(["x", "yy"], rows, url=service.url, timeout_s=TIMEOUT_S) == [1.0, 2.0]
    ((_, content, _),) = service.asked
    assert content == {"texts": ["x", "yy"], "rows": [{"answer": "a"}, {"answer": "{1, 2}"}]}


def test_what_passes_is_asked_again() -> None:
    def answer(service: Service, _: Any) -> Any:
        return (503, 429, {"rewards": [0.5]})[len(service.asked) - 1]

    with serving(answer) as service:
        assert remote.reward(["x"], [{}], url=service.url, timeout_s=TIMEOUT_S) == [0.5]
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "reason", "tries"),
    [
        (lambda *_: 500, "unavailable", r"got no answer from http://\S+ \(500 Internal Server Error; 5 tries\)", 5),
        (lambda *_: 507, "unavailable", r"got no answer from http://\S+ \(507 Insufficient Storage; 5 tries\)", 5),
        (lambda *_: 501, "unavailable", r"got no answer from http://\S+ \(501 Not Implemented; 1 try\)", 1),
        (lambda *_: 404, "unavailable", r"got no answer from http://\S+ \(404 Not Found; 1 try\)", 1),
        (late, "unavailable", r"got no answer from http://\S+ \(TimeoutError: timed out; 1 try\)", 1),
        (lambda *_: b"<html>", "invalid", r"expected JSON from http://\S+, got b'<html>'", 1),
        (lambda *_: b"", "invalid", r"expected JSON from http://\S+, got b''", 1),
        (
            lambda *_: [1, 2],
            "invalid",
            r"expected 'rewards' for 2 responses from http://\S+, got \[1, 2\]",
            1,
        ),
        (lambda *_: {"rewards": [1]}, "invalid", r"expected 'rewards' for 2 responses from", 1),
        (lambda *_: {"rewards": "no"}, "invalid", r"expected 'rewards' for 2 responses from", 1),
    ],
)
def test_invalid_answers_of_a_service(answer: Any, kind: Kind, reason: str, tries: int) -> None:
    began = time.monotonic()
    with serving(answer) as service:
        first, second = remote.reward(["x", "y"], [{}] * 2, url=service.url, timeout_s=TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S + 1
    assert isinstance(first, Failure)
    assert first == second
    assert first.kind == kind
    assert re.match(reason, first.reason)
    assert len(service.asked) == tries


def test_an_error_about_one_response_does_not_affect_others() -> None:
    given = [1, None, True, {"error": "too long"}, "1.0", 10**400]
    with serving(lambda *_: {"rewards": given}) as service:
        number, *failures = remote.reward(["x"] * 6, [{}] * 6, url=service.url, timeout_s=TIMEOUT_S)
    assert number == 1.0
    url = service.url
    assert failures == [
        Failure("invalid", f"expected a number from {url}, got None"),
        Failure("invalid", f"expected a number from {url}, got True"),
        Failure("unavailable", f"got an error from {url}: too long"),
        Failure("invalid", f"expected a number from {url}, got 1.0"),
        Failure("invalid", f"expected a number from {url}, got 1{'0' * 79}"),
    ]


def test_a_service_that_is_not_running() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (failure,) = remote.reward(["x"], [{}], url=f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S)
    assert isinstance(failure, Failure)
    assert failure.kind == "unavailable"
    assert "(ConnectionRefusedError: [Errno 111] Connection refused; 5 tries)" in failure.reason


def said(text: str) -> Mapping[str, Any]:
    """Return an answer in the form of the OpenAI protocol."""
    return {"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


def judged(service: Service, texts: list[str], **options: Any) -> list[Any]:
    rows = [{"prompt": "1+1", "answer": 2}] * len(texts)
    asked = {"url": f"{service.url}/v1", "model": "wise", "prompt": "{prompt}={answer}? {response}", **options}
    return judge.reward(texts, rows, timeout_s=TIMEOUT_S, **asked)


def test_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "abc")
    with serving(lambda _, content: said(f"Score: 0. No: score: {len(content['messages'][0]['content'])}")) as service:
        assert judged(service, ["2", "{3}"], max_tokens=9, api_key="MY_KEY") == [8.0, 10.0]
    assert {(path, key) for path, _, key in service.asked} == {("/v1/chat/completions", "Bearer abc")}
    contents = sorted((content for _, content, _ in service.asked), key=str)
    message = {"role": "user", "content": "1+1=2? 2"}
    assert contents[0] == {"model": "wise", "messages": [message], "max_tokens": 9, "temperature": 0.0}


def test_a_judge_is_not_asked_about_a_column_that_is_null() -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1+1", "answer": {"value": 2}}, {"prompt": "1+1", "answer": None}]
    prompt = "{{}} {prompt}={answer[value]}? {response}"
    with serving(lambda *_: said("score: 1")) as service:
        url = f"{service.url}/v1"
        given = judge.reward(["2", "2"], rows, url=url, model="wise", prompt=prompt, timeout_s=TIMEOUT_S)
    assert given == [1.0, Failure("unreadable", "found no 'answer[value]' in the row (None)")]
    assert [content["messages"][0]["content"] for _, content, _ in service.asked] == ["{} 1+1=2? 2"]


@pytest.mark.parametrize("score", [r"\[\[(\d+)\]\]", r"\[(\d+)(\])", r"\d"])
def test_a_score_of_another_form(score: str) -> None:
    with serving(lambda *_: said("[[7]]")) as service:
        assert judged(service, ["2"], score=re.compile(score)) == [7.0]


@pytest.mark.parametrize("score", [r"(\w+)$", r"(\d+)?good"])
def test_a_score_that_is_no_number_is_of_one_response_alone(score: str) -> None:
    def answer(_: Service, content: Any) -> Any:
        return said("7 7good 7" if "2" in content["messages"][0]["content"].partition("?")[2] else "7 is good")

    with serving(answer) as service:
        number, failure = judged(service, ["2", "3"], score=re.compile(score))
    assert number == 7.0
    assert failure.kind == "invalid"
    assert failure.reason.startswith("expected a number as the judge's score, got ")


def test_no_key_is_sent_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(lambda *_: said("score: 1")) as service:
        assert judged(service, ["2"]) == [1.0]
    assert service.asked[0][2] is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said("It is good."), "found no score in the judge's answer: 'It is good.'"),
        (
            {"error": {"message": "no such model"}},
            "expected a chat completion from the judge, got {'error': {'message'",
        ),
        ({"choices": []}, "expected a chat completion from the judge, got {'choices': []}"),
        ([], "expected a chat completion from the judge, got []"),
    ],
)
def test_a_judge_that_says_no_score(answer: Any, reason: str) -> None:
    with serving(lambda *_: answer) as service:
        (failure,) = judged(service, ["2"])
    assert failure.kind == "invalid"
    assert failure.reason.startswith(reason)


def test_responses_are_judged_together() -> None:
    """One that is late does not keep the others from being asked about."""

    def answer(service: Service, content: Any) -> Any:
        if "slow" in content["messages"][0]["content"]:
            service.closing.wait(60)
        return said("score: 1")

    began = time.monotonic()
    with serving(answer) as service:
        given = judged(service, ["slow"] * 4 + ["quick"])
        assert time.monotonic() - began < TIMEOUT_S + 1
    assert [getattr(each, "kind", each) for each in given] == ["unavailable"] * 4 + [1.0]
