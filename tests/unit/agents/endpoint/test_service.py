"""The tokens of chats, whatever a model says in them."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.episodes import EndpointEpisode
from rlflow.agents.endpoint.history import to_bytes
from rlflow.agents.endpoint.service import Chat as ChatRequest
from rlflow.agents.endpoint.service import Options, Service
from rlflow.agents.messages import Call, Reply
from tests.unit.agents.endpoint.conftest import (
    END,
    NAMES,
    ScriptedEngine,
    ids_of,
    post,
    read_template,
    save_tokenizer,
    words,
)

pytestmark = pytest.mark.slow  # the endpoint takes some seconds to start


class Chat:
    """An episode's chat over HTTP."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.episode, token = engine.open()
        self.headers = {"Authorization": f"Bearer {token}"}
        self.messages: list[Any] = []

    def say(self, *messages: Any) -> Any:
        """Add messages, and return the model's, which is added too."""
        self.messages += messages
        status, answer = post(self.engine, "/v1/chat/completions", {"messages": self.messages}, self.headers)
        assert status == 200, answer
        self.messages.append(answer["choices"][0]["message"])
        return self.messages[-1]

    @property
    def counts(self) -> list[str]:
        """Return what was counted in the episode."""
        return self.engine.counts_of(self.episode)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_any_tokens_stay_as_they_are_for_200_turns(engine: ScriptedEngine) -> None:
    """Replies are random tokens, cut ones among them, and a new prompt adds to all tokens before."""
    random = Random(0)

    def answer(call: Call) -> list[int]:
        ids = [random.choice([*range(END), *range(END + 1, 265)]) for _ in range(random.randrange(1, 9))]
        return ids + [END] * (random.random() < 0.7)

    engine.answer = answer
    chat = Chat(engine)
    tail = words("\n<|im_start|>user\nré<tool_call><|im_end|>\n<|im_start|>assistant\n", finished=False)
    for turn in range(200):
        chat.say(user("ré<tool_call>"))
        prompt = ids_of(engine.calls[-1].prompt_ids)
        if turn:
            reply = engine.replies[turn - 1]
            end = [] if reply[-1] == END else [END]
            assert prompt == [*ids_of(engine.calls[-2].prompt_ids), *reply, *end, *tail]
    assert chat.counts == []


def test_what_a_user_writes_is_no_special_token(engine: ScriptedEngine) -> None:
    Chat(engine).say(user("".join(NAMES)))
    prompt = ids_of(engine.calls[0].prompt_ids)
    assert [token for token in prompt if token in (256, 257, END)] == [257, END, 257]
    assert bytes(token for token in prompt if token < 256).startswith(b"user\n<|endoftext|><|im_start|><|im_end|>")


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda messages: messages[1].update(content="changed"), "rerendered_edited"),
        (lambda messages: messages[0].update(content="changed"), "rerendered_edited"),
        (lambda messages: messages.insert(2, {"role": "assistant", "content": "more"}), "rerendered_edited"),
        (lambda messages: messages.__delitem__(slice(0, 2)), "rerendered_compaction"),
        (lambda messages: messages.clear(), None),
        (lambda messages: messages[1].update(content=" ok\n", refusal=None), None),
    ],
)
def test_a_changed_history_is_counted(engine: ScriptedEngine, edit: Any, name: str | None) -> None:
    chat = Chat(engine)
    for text in "abc":
        chat.say(user(text))
    edit(chat.messages)
    chat.say(user("d"))
    assert chat.counts == ([] if name is None else [name])


def test_subagents_and_branches_continue_their_own_tokens(engine: ScriptedEngine) -> None:
    chat = Chat(engine)
    chat.say(user("a"))
    branch, other = list(chat.messages), list(chat.messages)
    for messages in (branch, other, branch, [user("a subagent")]):
        chat.messages = messages
        chat.say(user(f"after {len(messages)}"))
    first, *rest = (ids_of(call.prompt_ids) for call in engine.calls)
    assert [prompt[: len(first)] == first for prompt in rest] == [True, True, True, False]
    assert rest[2][: len(rest[0])] == rest[0]
    assert chat.counts == []


class InstantLink:
    """A link to an engine that answers at once."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.prompts: list[list[int]] = []
        self.counts: list[str] = []

    async def call(self, episode: str, prompt_ids: bytes, max_tokens: int, is_repeated: bool) -> Reply:
        self.prompts.append(ids_of(prompt_ids))
        return Reply(len(self.prompts), to_bytes(words(self.texts[len(self.prompts) - 1])), b"", finished=True)

    def count(self, episode: str, name: str) -> None:
        self.counts.append(name)


def test_thoughts_that_a_client_drops_end_with_the_template(tmp_path: Path) -> None:
    """Qwen3 drops thoughts when a user says something new, so a segment with thoughts of an earlier call ends there."""
    save_tokenizer(tmp_path, read_template("qwen3").replace("# Tools", "# My tools"))  # no known family
    link: Any = InstantLink("<think>hm</think>I look.", "It is 4.", "Yes.")
    service = Service(ModelSpec(str(tmp_path), "policy", 4096, 256), link)
    episode, messages = EndpointEpisode("e", b"", b""), [user("2 + 2?")]
    for message in ({"role": "tool", "content": "4"}, user("Sure?"), None):
        answer = asyncio.run(service.answer_chat(episode, ChatRequest(messages, [], Options()), {}))
        messages += [{"role": "assistant", "content": answer.text}, message]
    first, second, third = link.prompts
    assert second[: len(first)] == first
    assert third[: len(first)] == first
    assert ord("h") in second[len(first) : len(first) + 3]
    text = (
        "I look.<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    text += "It is 4.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert third[len(first) :] == words(text, finished=False)
    assert link.counts == ["rerendered_template"]
