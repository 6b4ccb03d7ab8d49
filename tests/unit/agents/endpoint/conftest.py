"""An endpoint whose engine is a test."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from tokenizers import AddedToken

from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.process import Endpoint
from rlflow.agents.messages import Call, CancelCall, Count, OpenEpisode, Refusal, Reply
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe import Model

END = 258
"""The token ``<|im_end|>`` of ``tokenizer: bytes``."""
NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
NAMES += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""The tokens from 256 on."""

Answer = Callable[[Call], Sequence[int] | Refusal | None]


def words(text: str, *, finished: bool = True) -> list[int]:
    """Return the tokens of a text, in which ``<tool_call>`` and others are single tokens."""
    parts = re.split("(" + "|".join(map(re.escape, NAMES)) + ")", text)
    ids = [[256 + NAMES.index(part)] if part in NAMES else list(part.encode()) for part in parts]
    return [*itertools.chain(*ids), *([END] if finished else [])]


def show(ids: Sequence[int]) -> str:
    """Return tokens as text, where the tokens from 256 on are in brackets."""
    return "".join(f"[{NAMES[token - 256]}]" if token > 255 else chr(token) for token in ids)


def ids_of(tokens: bytes) -> list[int]:
    """Return int32 tokens as numbers."""
    ids: list[int] = np.frombuffer(tokens, np.int32).tolist()
    return ids


@dataclass
class ScriptedEngine:
    """The engine's side of an endpoint. ``answer`` returns the tokens of a reply, a refusal, or None for no answer."""

    answer: Answer = lambda call: words("ok")
    model: ModelSpec = field(init=False)
    endpoint: Endpoint = field(init=False)
    calls: list[Call] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    counts: list[tuple[str, str]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def start(self, folder: Path) -> None:
        """Start the endpoint for the tokenizer in a folder."""
        self.model = ModelSpec(str(folder), "policy", max_tokens=16384, turn_tokens=256)
        self.endpoint = Endpoint(self.model, self.receive, self.deaths.append)

    def open(self, worker_token: str = "worker") -> tuple[str, str]:
        """Open an episode, and return its id and token."""
        number = next(self.numbers)
        self.endpoint.send([OpenEpisode(f"e{number}", f"secret-{number}", worker_token)])
        return f"e{number}", f"secret-{number}"

    def receive(self, messages: Sequence[Call | CancelCall | Count]) -> None:
        """Answer calls; a thread of the endpoint."""
        for message in messages:
            if isinstance(message, Count):
                self.counts.append((message.episode, message.name))
            elif isinstance(message, CancelCall):
                self.cancelled.append(message.number)
            else:
                self.calls.append(message)
                self.reply(message, self.answer(message))

    def reply(self, call: Call, answer: Sequence[int] | Refusal | None) -> None:
        """Send the answer to a call."""
        if isinstance(answer, Refusal):
            self.endpoint.send([answer])
        elif answer is not None:
            self.replies.append(list(answer))
            logprobs = np.full(len(answer), -0.5, np.float32).tobytes()
            reply = Reply(call.number, np.array(answer, np.int32).tobytes(), logprobs, answer[-1:] == [END])
            self.endpoint.send([reply])

    def counts_of(self, episode: str) -> list[str]:
        """Return the names that were counted in an episode."""
        return [name for counted, name in self.counts if counted == episode]


def post(
    engine: ScriptedEngine, path: str, body: Any, headers: Mapping[str, str], method: str = "POST"
) -> tuple[int, Any]:
    """Return the status and the answer to a body, which is bytes, an object, or None for a request without one."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = HTTPConnection(engine.endpoint.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET" if body is None else method, path, data, dict(headers))
        response = connection.getresponse()
        content = response.read()
        is_stream = response.headers["Content-Type"] == "text/event-stream"
        return response.status, content if is_stream else json.loads(content)
    finally:
        connection.close()


def read_template(name: str) -> str:
    """Return the chat template of a model that trl knows."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def save_tokenizer(folder: Path, template: str | None = None) -> None:
    """Save the tokenizer of bytes, with the special tokens of pictures if it gets another template."""
    tokenizer = new_tokenizer(Model(tokenizer="bytes", random_weights=True))
    if template is not None:
        names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def shared_engine(folder: Path) -> Iterator[ScriptedEngine]:
    """Start one endpoint for all tests of a process."""
    engine = ScriptedEngine()
    engine.start(folder)
    yield engine
    engine.endpoint.stop()


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    """Return the endpoint's engine with nothing recorded."""
    shared_engine.answer = lambda call: words("ok")
    for record in (shared_engine.calls, shared_engine.replies, shared_engine.counts, shared_engine.cancelled):
        record.clear()
    return shared_engine
