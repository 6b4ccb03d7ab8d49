"""A node asks a teacher's server for fields that vLLM's own classes have, and reads such fields."""

import json

import numpy as np
import pytest

from rlflow.nodes.teacher_server import ServedTopLogprobs, _likeliest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_vllm_knows_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    tokenize = pytest.importorskip("vllm.entrypoints.serve.tokenize.protocol")
    logprob = pytest.importorskip("vllm.logprobs").Logprob
    place = {7: logprob(logprob=-9.0, rank=5, decoded_token="x"), 3: logprob(logprob=-0.5, rank=1, decoded_token="y")}
    asked = []

    def post(url: str, body: dict[str, object], timeout_s: float, headers: dict[str, str]) -> object:
        asked.append(url)
        if url.endswith("/detokenize"):
            tokenize.DetokenizeRequest.model_validate(body)
            return tokenize.DetokenizeResponse(prompt="xy").model_dump()
        request = protocol.CompletionRequest.model_validate(body)
        assert (request.prompt, request.prompt_logprobs, request.max_tokens) == ([1, 2, 7, 7], 2, 1)
        choice = protocol.CompletionResponseChoice(index=0, text="", prompt_logprobs=[None, place, place, place])
        return json.loads(protocol.CompletionResponse.model_construct(choices=[choice]).model_dump_json())

    monkeypatch.setattr("rlflow.nodes.teacher_server.post", post)
    node = ServedTopLogprobs(url="http://host:8000/v1", model="teacher", count=2)
    node._check_text([7, 7], "xy")
    assert len(node._words(np.array([1, 2]), np.array([7, 7]))) == 2
    assert _likeliest({str(word): vars(entry) for word, entry in place.items()}, 1) == [(3, -0.5)]
    assert asked == ["http://host:8000/detokenize", "http://host:8000/v1/completions"]
