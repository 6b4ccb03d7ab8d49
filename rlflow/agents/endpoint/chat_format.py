"""Messages as tokens, and replies as messages, in the form of a model's chat template.

Tokens of earlier calls stay as they are. A *bridge* adds only what a new call says after the last reply: that of the
library ``renderers`` for families of models that it knows by their template, and else one that renders a marker in the
place of the reply, and takes the text after it.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from secrets import token_hex
from types import FrameType
from typing import Any

from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.endpoint.history import Message, Turn, to_ids
from rlflow.agents.endpoint.plain_tokenizer import PlainTokenizer, load_tokenizer
from rlflow.errors import first_line

_RENDER_S = 10.0  # CPU time to render a chat: a template comes with a model, and a model from anyone
# Texts that stand for a reply and its thoughts. Nobody can guess them.
_MARKER, _THOUGHTS = token_hex(12), token_hex(12)
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
# A family of models is known by the tokens of these chats.
_PROBES: tuple[tuple[list[Message], list[Any] | None], ...] = (
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}], None),
    ([{"role": "user", "content": "Hello?"}], [_PROBE_TOOL]),
)


@dataclass(frozen=True)
class ParsedReply:
    """A reply of the model, read."""

    content: str
    thoughts: str | None
    tool_calls: Sequence[tuple[str | None, str, Mapping[str, Any]]]
    """The id of each call if the model wrote one, its name and its arguments."""


class ChatFormat:
    """The tokenizer of a model with its chat template."""

    def __init__(self, model: ModelSpec) -> None:
        """Load the tokenizer. Raises EngineError."""
        from renderers import DefaultRendererConfig, create_renderer

        self._options = dict(model.template_options)
        self._tokenizer = load_tokenizer(model.tokenizer)
        self.num_tokens = len(self._tokenizer)
        self._plain = PlainTokenizer(self._tokenizer)
        self._family = self._find_family() if self._tokenizer.chat_template else None
        # Other models call tools as Qwen3 does, or their calls are text.
        self._parser = self._family or create_renderer(self._plain, DefaultRendererConfig(tool_parser="qwen3"))
        self._end_ids = set(self._parser.get_stop_token_ids())

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """Return the tokens of a text. Raises ApiError if the tokenizer refuses it."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=is_start)
        except Exception as error:  # tokenizers have no base class for their errors
            raise ApiError(f"the model's tokenizer refuses the text ({first_line(error)})") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of a whole chat, up to where the model replies. Raises ApiError."""
        with _rendering():
            messages, tools = self._plain.protect(messages), self._plain.protect(tools)
            if self._family:
                ids: list[int] = self._family.render_ids(messages, tools=tools or None, add_generation_prompt=True)
                return ids
            return self._plain.encode(self._render_text(messages, tools))

    def bridge(
        self, turn: Turn, prompt_ids: list[int], messages: Sequence[Message], place: int, tools: Sequence[Any]
    ) -> list[int] | None:
        """Return the tokens that a chat adds to those of ``turn``, whose reply is the message at ``place``.

        They are None where the template rewrites what came before.
        """
        with _rendering():
            messages, tools = self._plain.protect(messages), self._plain.protect(tools)
            if self._family:
                reply_ids, new = to_ids(turn.reply), messages[place + 1 :]
                bridged = self._family.bridge_to_next_turn(prompt_ids, reply_ids, new, tools=tools or None)
                length = len(prompt_ids) + len(reply_ids)
                if bridged is not None and bridged.token_ids[:length] == prompt_ids + reply_ids:
                    ids: list[int] = bridged.token_ids[length:]
                    return ids
            text = self._text_after(turn, messages, place, tools)
            ids = self._plain.encode(text or "")
            # The template ends a reply, as the model did unless it was cut.
            is_ended = turn.finished and ids and to_ids(turn.reply)[-1:] == ids[:1]
            return (ids[1:] if is_ended else ids) or None

    def parse(self, prompt_ids: list[int], ids: list[int], tools: Sequence[Any]) -> ParsedReply:
        """Return the content of a reply. Without tools, or where no call can be read, a call is text."""
        from renderers import ToolCallParseStatus as Status

        with suppress(Exception):  # a random model writes whatever no parser expects
            parsed = self._parser.parse_response(ids, prompt_ids=prompt_ids, tools=list(tools) or None)
            readable = (Status.OK, Status.INVALID_JSON, Status.UNKNOWN_TOOL)
            calls = [
                (call.id, call.name, call.arguments)
                for call in parsed.tool_calls
                if call.status in readable and call.name and isinstance(call.arguments, dict)
            ]
            if not parsed.tool_calls or (calls and tools):
                return ParsedReply(parsed.content, parsed.reasoning_content, calls)
        ends = len(ids) - 1 if ids[-1:] and ids[-1] in self._end_ids else len(ids)
        return ParsedReply(self.decode(ids[:ends]), None, ())

    def _text_after(self, turn: Turn, messages: Sequence[Message], place: int, tools: Sequence[Any]) -> str | None:
        """Return the text of a chat after a reply; None where the template changes the text before it."""
        reply = {"role": "assistant", "content": _MARKER}
        if turn.has_thoughts:
            reply["reasoning_content"] = _THOUGHTS
        text = self._render_text([*messages[:place], reply, *messages[place + 1 :]], tools)
        before, _, after = text.partition(_MARKER)
        head, thoughts, _ = before.partition(_THOUGHTS)
        earlier = self._render_text(messages[:place], tools)
        if not (earlier.startswith(head) or head.startswith(earlier)):
            return None
        if thoughts or not turn.has_thoughts:
            return after
        # The template may not know thoughts, or drop them when a user says something new.
        return None if _THOUGHTS in self._render_text([*messages[:place], reply], tools, is_open=False) else after

    def _render_text(self, messages: Sequence[Message], tools: Sequence[Any], *, is_open: bool = True) -> str:
        if not self._tokenizer.chat_template:
            raise ApiError("the model's tokenizer has no chat template")
        options = {**self._options, "tools": list(tools) or None, "add_generation_prompt": is_open, "tokenize": False}
        text: str = self._tokenizer.apply_chat_template(list(messages), **options)
        return text

    def _find_family(self) -> Any:
        """Return the renderer that gives the same tokens as the template, or None."""
        from renderers import base, config_from_name, create_renderer

        with suppress(Exception), _rendering():
            texts = [self._render_text(messages, tools or []) for messages, tools in _PROBES]
            probes = [self._plain.encode(text) for text in texts]
            default = create_renderer(self._plain, config_from_name("default"))  # this fills the registry
            # Small models of a family may think only if they are asked to.
            for name, more in product(base.RENDERER_REGISTRY, ({}, {"enable_thinking": False})):
                with suppress(Exception):  # the tokenizer lacks tokens of this family
                    options = more | self._options
                    renderer = create_renderer(self._plain, config_from_name(name), chat_template_kwargs=options)
                    if type(renderer) is not type(default) and probes == [
                        renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
                        for messages, tools in _PROBES
                    ]:
                        return renderer
        return None


@contextmanager
def _rendering() -> Iterator[None]:
    """Limit the time of rendering. Raises ApiError whatever a template raises."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise ApiError(f"the chat template takes more than {_RENDER_S:g} s")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _RENDER_S)
    try:
        yield
    except ApiError:
        raise
    except Exception as error:  # templates raise errors of many kinds
        raise ApiError(f"the chat template refuses the messages ({first_line(error)})") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
