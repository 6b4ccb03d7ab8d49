"""Renders chat templates in a process of their own, because a template comes with a model, and a model from anyone.

transformers renders them in jinja2's sandbox, which keeps them from Python's objects. The sandbox limits neither time
nor memory: a few nested loops would keep the run from starting, and a repeated text would fill the host.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlflow.data.messages import Message, as_conversation, with_instructions
from rlflow.errors import first_line
from rlflow.recipe import Data
from rlflow.system.processes import limit_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 10.0
"""Time to render one conversation."""
_MEMORY = 2**30  # bytes that a template may allocate
_MAX_CHARACTERS = 2**24


class TemplateError(Exception):
    """A chat template failed, or exceeded a limit."""


def processor_template(path: str) -> str | None:
    """Return the chat template that the model at ``path`` has in a file of its processor, or None.

    Tokenizers do not read this file, which repositories of vision-language models from 2024 have.
    """
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "chat_template.json")
        content = json.loads(Path(str(file)).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None


def format_chat(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Any,
    adapt: Callable[[list[Message]], list[Message]] = list,
) -> str:
    """Apply the chat template to a conversation, or to a text; ``adapt`` brings messages into the template's form."""
    messages = adapt(with_instructions(as_conversation(prompt), data.system_prompt))
    options = data.template_options
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def render_all(
    render: Callable[[Any], str], conversations: Sequence[Any], rows: Sequence[int] | None = None
) -> list[str]:
    """Return the text of each conversation. Raises TemplateError, whose message continues a sentence.

    ``rows`` are the rows of the data that they come from; by default each has one.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        _answer(theirs, render, conversations)
    theirs.close()
    try:
        ours.settimeout(SECONDS)
        with ours, ours.makefile("rb") as answers:
            return [_read(answers, row) for row in rows or range(len(conversations))]
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read(answers: Any, row: int) -> str:
    try:
        line = answers.readline()
    except TimeoutError:
        raise TemplateError(f"takes more than {SECONDS:g} s for row {row}") from None
    if not line:
        raise TemplateError(f"needs more memory than {_MEMORY // 2**20} MiB for row {row}, or ended its process")
    answer = json.loads(line)
    if "text" not in answer:
        raise TemplateError(f"fails for row {row} ({answer['error']})")
    return str(answer["text"])


def _answer(end: socket.socket, render: Callable[[Any], str], conversations: Sequence[Any]) -> NoReturn:
    """Send a line of JSON for each conversation, and exit; the child's part."""
    try:
        limit_memory(_MEMORY)
        for conversation in conversations:
            try:
                text = render(conversation)
                answer = {"text": text} if len(text) <= _MAX_CHARACTERS else {"error": f"{len(text)} characters"}
            except Exception as error:  # templates raise errors of many kinds
                answer = {"error": first_line(error)}
            end.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        # Whatever happens, the process must not continue as a copy of its parent.
        os._exit(0)
