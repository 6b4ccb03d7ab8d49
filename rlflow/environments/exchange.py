"""The other side of an engine's conversations: the environment, the tokenizer, and the limits."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from secrets import token_hex
from typing import Any, Literal

from rlflow.batch import Rollouts
from rlflow.engines.base import Sampling
from rlflow.environments.options import CHAT_FRAME, TurnOptions
from rlflow.environments.transcript import Transcript, piece_of
from rlflow.environments.turn import TurnResult
from rlflow.errors import EnvironmentFailedError, RecipeError, first_line
from rlflow.rewards.base import Failure, Row
from rlflow.rewards.pool import ProcessPool
from rlflow.system.processes import num_own_cpus

Answer = TurnResult | Failure
_FIX_FRAME = "write the text around an answer, with {} in its place"
Answered = tuple[Transcript, Answer]


class Exchange:
    """The steps of conversations between two turns, in the process of the engine that holds their tokens."""

    def __init__(self, options: TurnOptions, tokenizer: Any) -> None:
        """Start the environment. ``tokenizer`` is that of the engine. Raises RecipeError and EngineError."""
        self._options, self._tokenizer = options, tokenizer
        self._stop_ids = tuple(self._stop_token(text) for text in options.stop)
        frame = _chat_frame(tokenizer) if options.frame == CHAT_FRAME else options.frame.split("{}")
        self._before, self._after = self._tokenize(frame)
        specs = {options.environment: options.environment_spec}
        self._pool = ProcessPool(specs, options.processes or num_own_cpus())

    def turn_sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling of single turns."""
        return Sampling(
            max_tokens=self._options.turn_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_ids=self._stop_ids,
        )

    def add_turn(self, transcript: Transcript, turns: Rollouts, row: int) -> None:
        """Add a row of ``turns`` to a conversation. A turn that was cut at its limit ends the conversation."""
        transcript.add_turn(piece_of(turns, row), turns.texts[row])
        transcript.is_done = not turns.finished[row]

    def ask(self, transcripts: Sequence[Transcript], rows: Sequence[Row]) -> "list[Future[Answer]]":
        """Let the environment answer the last turns. Return a future of the Answer for each conversation.

        ``rows`` are the conversations' rows of the data set.
        """
        texts = [transcript.text for transcript in transcripts]
        states = [(row, transcript.state) for transcript, row in zip(transcripts, rows, strict=True)]
        return self._pool.submit(self._options.environment, texts, states)

    def add_answers(self, answered: Iterable[Answered]) -> None:
        """Add answers of the environment to conversations, or end them.

        Raises RecipeError or EnvironmentFailedError for a failure, with ``on_failure: stop``.
        """
        continuing: list[tuple[Transcript, str]] = []
        for transcript, answer in answered:
            transcript.is_done = True
            if isinstance(answer, Failure):
                options = self._options
                transcript.reason = failure_reason(options.environment, options.on_failure, answer)
                continue
            transcript.rewards.append(answer.reward)
            transcript.finished, transcript.state = answer.done, answer.state
            if not answer.done and transcript.num_turns < self._options.max_turns:
                continuing.append((transcript, answer.text))
        for (transcript, _), ids in zip(continuing, self._frame([text for _, text in continuing]), strict=True):
            if transcript.length + len(ids) + self._options.turn_tokens <= self._options.max_tokens:
                transcript.add_answer(ids)
                transcript.is_done = False

    def _frame(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the environment's answers as tokens, within the frame.

        Special tokens inside an answer are encoded as plain text: a tool may repeat what the model told it to.
        """
        answers = self._tokenize(texts, split_special_tokens=True) if texts else []
        return [[*self._before, *ids, *self._after] for ids in answers]

    def _tokenize(self, texts: Sequence[str], **options: bool) -> list[list[int]]:
        """Return the tokens of each text. Raise RecipeError for a text that the tokenizer refuses."""
        try:
            ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, **options)["input_ids"]
        except Exception as error:  # tokenizers have no base class for their errors
            fact = f"the tokenizer refuses the output of '{self._options.environment}' ({first_line(error)})"
            raise RecipeError("environment", fact, fix="use characters that the model knows") from None
        return ids

    def _stop_token(self, text: str) -> int:
        ids = self._tokenize([text])[0]
        if len(ids) != 1:
            raise RecipeError(
                "stop", f"expected a single token, got {text!r}, which is {len(ids)}", fix="a text that is one token"
            )
        return ids[0]


def _chat_frame(tokenizer: Any) -> list[str]:
    """Return what a chat template has before and after an answer, from the end of the model's turn to its next one."""
    reply, answer = token_hex(8), token_hex(8)
    messages = [("user", "?"), ("assistant", reply), ("user", answer)]
    try:
        text: str = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template may raise anything, and a tokenizer has none
        fact = f"the tokenizer's chat template cannot be used ({first_line(error)})"
        raise RecipeError("frame", fact, fix=_FIX_FRAME) from None
    between = text.partition(reply)[2]
    end = str(tokenizer.eos_token)
    if not between.startswith(end) or between.count(answer) != 1:
        fact = f"the tokenizer's chat template does not end the assistant's turn with '{end}', and then show the user's"
        raise RecipeError("frame", fact, fix=_FIX_FRAME)
    return between.removeprefix(end).split(answer)


def failure_reason(environment: str, on_failure: Literal["stop", "exclude"], failure: Failure) -> str:
    """Return why an environment failed. With ``stop``, raise RecipeError or EnvironmentFailedError instead."""
    fact = f"'{environment}' {failure.reason}"
    if on_failure == "exclude":
        return fact
    if failure.kind in ("raised", "invalid"):
        raise RecipeError("environment", fact, fix="on_failure: exclude leaves such conversations out")
    raise EnvironmentFailedError(f"environment {fact}. With on_failure: exclude such conversations are left out.")
