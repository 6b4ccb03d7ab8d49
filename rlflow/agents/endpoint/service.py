"""Answers chats, texts and tokens, in whatever form a client asked for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.chat_format import ChatFormat
from rlflow.agents.endpoint.episodes import EndpointEpisode
from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.endpoint.history import Message, Turn, to_bytes, to_ids
from rlflow.agents.endpoint.link import EngineLink
from rlflow.agents.messages import Reply


@dataclass(frozen=True)
class Options:
    """The choices that a request has about its reply."""

    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    ignored: Sequence[str] = ()
    """Options that would change the distribution of replies."""


@dataclass(frozen=True)
class Chat:
    """A request for the next message of a chat, in OpenAI's form."""

    messages: Sequence[Message]
    tools: Sequence[Any]
    options: Options


@dataclass(frozen=True)
class Answer:
    """A reply to a request of any form."""

    id: str
    """The episode and the number of the call, for the ids of replies."""
    num_prompt_tokens: int
    reply: Reply
    text: str = ""
    thoughts: str | None = None
    tool_calls: Sequence[tuple[str, str, Mapping[str, Any]]] = ()
    """The id, name and arguments of each call."""
    stop: str | None = None
    """The stop text at which the text is cut."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the reply."""
        return len(self.reply.ids) // 4

    @property
    def is_cut(self) -> bool:
        """Return whether the reply ended at its limit."""
        return not self.reply.finished and self.stop is None


class Service:
    """The model behind the endpoint."""

    def __init__(self, model: ModelSpec, link: EngineLink) -> None:
        self.model = model
        self.link = link
        self.format = ChatFormat(model)

    async def answer_ids(
        self, episode: EndpointEpisode, ids: Sequence[int], options: Options, headers: Mapping[str, str]
    ) -> Answer:
        """Return the reply to tokens. Raises ApiError."""
        for name in options.ignored:
            self.link.count(episode.id, f"ignored_{name}")
        if not ids:
            raise ApiError("the prompt is empty")
        room = self.model.max_tokens - len(ids)
        if room < 1:
            self.link.count(episode.id, "refused_context")
            fact = f"the prompt has {len(ids)} tokens, and with a reply there is room for {self.model.max_tokens}"
            raise ApiError(fact, code="context_length_exceeded")
        limit = min(options.max_tokens or room, self.model.turn_tokens, room)
        is_repeated = episode.begin_call(headers)
        try:
            reply = await self.link.call(episode.id, to_bytes(ids), limit, is_repeated)
        finally:
            episode.num_open_calls -= 1
        return Answer(f"{episode.id}-{reply.number}", len(ids), reply)

    async def answer_text(
        self, episode: EndpointEpisode, text: str, options: Options, headers: Mapping[str, str]
    ) -> Answer:
        """Return the continuation of a text. One that continues an earlier reply keeps its tokens. Raises ApiError."""
        parent, new = None, text
        if known := episode.history.find_text(text):
            parent, new = known[1], text[len(known[0]) :]
        context = self.format.encode(new, is_start=parent is None)
        before = [*parent.prompt_ids, *to_ids(parent.reply)] if parent else []
        answer = await self.answer_ids_as_text(episode, before + context, options, headers)
        turn = Turn(parent, to_bytes(context), answer.reply.ids, answer.reply.finished)
        episode.history.add_text(text + answer.text, turn)
        return answer

    async def answer_ids_as_text(
        self, episode: EndpointEpisode, ids: Sequence[int], options: Options, headers: Mapping[str, str]
    ) -> Answer:
        """Return the reply to tokens as text. Raises ApiError."""
        answer = await self.answer_ids(episode, ids, options, headers)
        text, stop = _cut(self.format.decode(to_ids(answer.reply.ids), skip_special=True), options.stop)
        return replace(answer, text=text, stop=stop)

    async def answer_chat(self, episode: EndpointEpisode, chat: Chat, headers: Mapping[str, str]) -> Answer:
        """Return the next message of a chat. Raises ApiError."""
        parent, context = self._continue(episode, chat)
        ids = [*parent.prompt_ids, *to_ids(parent.reply), *context] if parent else context
        answer = await self.answer_ids(episode, ids, chat.options, headers)
        parsed = self.format.parse(ids, to_ids(answer.reply.ids), chat.tools)
        text, stop = _cut(parsed.content, chat.options.stop)
        calls = [] if stop is not None else parsed.tool_calls
        tool_calls = [
            (id or _tool_call_id(ids, answer.reply, place), name, arguments)
            for place, (id, name, arguments) in enumerate(calls)
        ]
        has_thoughts = bool(parsed.thoughts) or (parent is not None and parent.has_thoughts)
        turn = Turn(parent, to_bytes(context), answer.reply.ids, answer.reply.finished, has_thoughts)
        message = {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"function": {"name": name, "arguments": arguments}} for _, name, arguments in tool_calls],
        }
        episode.history.add_chat(chat.tools, [*chat.messages, message], turn)
        return replace(answer, text=text, thoughts=parsed.thoughts, tool_calls=tool_calls, stop=stop)

    def count_tokens(self, chat: Chat) -> int:
        """Return the number of tokens of a chat."""
        return len(self.format.render(chat.messages, chat.tools))

    def _continue(self, episode: EndpointEpisode, chat: Chat) -> tuple[Turn | None, list[int]]:
        """Return the turn that a chat continues with the tokens that it adds, or None and all of its tokens."""
        reason = None
        if known := episode.history.find_chat(chat.tools, chat.messages):
            place, turn = known
            if any(message["role"] == "assistant" for message in chat.messages[place + 1 :]):
                reason = "edited"
            else:
                context = self.format.bridge(turn, turn.prompt_ids, chat.messages, place, chat.tools)
                if context is not None:
                    return turn, context
                reason = "template"
        else:
            reason = episode.history.reason_of_new_segment(chat.messages)
        if reason is not None:
            self.link.count(episode.id, f"rerendered_{reason}")
        return None, self.format.render(chat.messages, chat.tools)


def _tool_call_id(prompt_ids: Sequence[int], reply: Reply, place: int) -> str:
    """Return an id that follows from what was sampled, since templates may show it. Some want 9 characters."""
    return blake2b(to_bytes([*prompt_ids, place]) + reply.ids, digest_size=5).hexdigest()[:9]


def _cut(text: str, stop_texts: Sequence[str]) -> tuple[str, str | None]:
    """Return the text up to the first of the stop texts, and which one that is."""
    places = [(place, stop) for stop in stop_texts if (place := text.find(stop)) >= 0]
    if not places:
        return text, None
    place, stop = min(places)
    return text[:place], stop
