"""An engine whose responses are conversations: each goes on as soon as its own environment has answered."""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Packed, Prompts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse
from rlflow.engines.serving.events import EventThread, Handler
from rlflow.engines.serving.sessions import WAITING_PER_SEQUENCE, SessionEngine
from rlflow.environments.exchange import Answer, Exchange
from rlflow.environments.transcript import (
    Transcript,
    build_conversations,
    piece_of,
    resumed_transcript,
    turn_prompts,
)
from rlflow.errors import EngineError, UserError, first_line
from rlflow.rewards.base import Row


@dataclass(eq=False)
class _Conversation:
    """A conversation that an engine holds."""

    key: NDArray[np.int64]
    prompt_ids: NDArray[np.int32]
    row: Row
    transcript: Transcript
    sampling: Sampling
    """The sampling of its turns."""
    future: "Future[Transcript]" = field(default_factory=Future)
    turn: "Future[Any] | None" = None
    """The turn that the engine generates now."""
    answer: "Future[Answer] | None" = None
    """The environment's answer that it waits for."""
    is_aborted: bool = False


class ConversationEngine(SessionEngine):
    """An engine of conversations over an engine that generates their turns. Its responses are transcripts.

    One thread handles all conversations, one event after another.
    """

    def __init__(self, engine: SessionEngine, exchange: Exchange) -> None:
        """Generate turns by ``engine``, with the other side in ``exchange``."""
        self._engine, self._exchange = engine, exchange
        self._live: dict[Future[Transcript], _Conversation] = {}
        """The conversations by their futures, which complete when they leave."""
        self._tokens_each = 0.0
        handlers = (self._continue, self._end_turns, self._take_answers, self._abort)
        self._events = EventThread("conversations", handlers, self._call)

    @property
    def capacity(self) -> tuple[int, int]:
        sequences, tokens = self._engine.capacity
        return WAITING_PER_SEQUENCE * sequences, tokens

    @property
    def decode_steps(self) -> int:
        """Return the mean number of tokens so far of a conversation that was there all the time."""
        return int(self._tokens_each)

    @property
    def progress(self) -> int:
        """Return the seconds of a clock while all conversations wait for their environments, and 0 otherwise."""
        live = list(self._live.values())
        return int(time.monotonic()) if live and all(conversation.turn is None for conversation in live) else 0

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        turn_sampling = self._exchange.turn_sampling(sampling)
        ids = Packed(samples.ids.values, samples.ids.offsets)
        conversations = [
            _Conversation(key, ids[row], data_row, resumed_transcript(before), turn_sampling)
            for row, (key, data_row, before) in enumerate(
                zip(samples.keys, samples.rows, partial or [NO_RESPONSE] * len(samples), strict=True)
            )
        ]
        self._live.update({conversation.future: conversation for conversation in conversations})
        self._events.post(self._continue, conversations)
        return [conversation.future for conversation in conversations]

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        self._events.post(
            self._abort, [conversation for future in futures if (conversation := self._live.get(future)) is not None]
        )
        wait(futures)

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Conversations:
        return build_conversations(samples, responses, sampling.scoring_temperature)

    def _call(self, handler: Handler, conversations: list[_Conversation]) -> None:
        """Call a handler with those of the conversations that are live."""
        live = [conversation for conversation in conversations if conversation.future in self._live]
        try:
            if live:
                handler(live)
        except BaseException as error:  # without an answer, callers would wait forever
            self._fail(live, error)

    def _end_turns(self, conversations: list[_Conversation]) -> None:
        """Add the turns that the engine has generated, or what it has of them."""
        responses = [conversation.turn.result() for conversation in conversations if conversation.turn is not None]
        count, keys = len(conversations), np.stack([conversation.key for conversation in conversations])
        # Nobody reads the prompts.
        samples = Prompts(keys=keys, ids=Packed.from_rows([()] * count, np.int32), rows=({},) * count)
        turns = self._engine.rollouts(samples, responses, conversations[0].sampling)
        lengths = turns.response_ids.lengths - [
            len(conversation.transcript.interrupted_turn.ids) for conversation in conversations
        ]
        self._count_tokens(int(lengths.sum()))
        for row, (conversation, response) in enumerate(zip(conversations, responses, strict=True)):
            conversation.turn = None
            if response.is_done:
                self._exchange.add_turn(conversation.transcript, turns, row)
            else:
                transcript = conversation.transcript
                transcript.interrupted_turn = transcript.without_known_routing(piece_of(turns, row))
        self._continue(conversations)

    def _take_answers(self, conversations: list[_Conversation]) -> None:
        """Add the environment's answers."""
        before = sum(conversation.transcript.length for conversation in conversations)
        self._exchange.add_answers(
            (conversation.transcript, conversation.answer.result())
            for conversation in conversations
            if conversation.answer is not None
        )
        self._count_tokens(sum(conversation.transcript.length for conversation in conversations) - before)
        for conversation in conversations:
            conversation.answer = None
        self._continue(conversations)

    def _abort(self, conversations: list[_Conversation]) -> None:
        """End conversations where they are. The next engine asks again where an answer is due."""
        for conversation in conversations:
            conversation.is_aborted = True
        self._continue([conversation for conversation in conversations if conversation.turn is None])
        self._engine.abort([conversation.turn for conversation in conversations if conversation.turn is not None])

    def _continue(self, conversations: list[_Conversation]) -> None:
        """Continue conversations that neither generate nor wait, or complete those that are done or aborted."""
        ending: list[_Conversation] = []
        asking: list[_Conversation] = []
        speaking: list[_Conversation] = []
        for conversation in conversations:
            is_ending = conversation.transcript.is_done or conversation.is_aborted
            (ending if is_ending else asking if conversation.transcript.is_answer_due else speaking).append(
                conversation
            )
        self._ask(asking)
        for sampling in dict.fromkeys(conversation.sampling for conversation in speaking):
            self._start_turns(
                [conversation for conversation in speaking if conversation.sampling == sampling], sampling
            )
        for conversation in ending:
            del self._live[conversation.future]
            conversation.future.set_result(conversation.transcript)

    def _ask(self, conversations: list[_Conversation]) -> None:
        answers = self._exchange.ask(
            [conversation.transcript for conversation in conversations],
            [conversation.row for conversation in conversations],
        )
        for conversation, answer in zip(conversations, answers, strict=True):
            conversation.answer = answer
            answer.add_done_callback(partial(self._notify, self._take_answers, conversation))

    def _start_turns(self, conversations: list[_Conversation], sampling: Sampling) -> None:
        transcripts = [conversation.transcript for conversation in conversations]
        keys = np.stack([conversation.key for conversation in conversations])
        prompts = turn_prompts(keys, [conversation.prompt_ids for conversation in conversations], transcripts)
        interrupted = [transcript.interrupted_turn for transcript in transcripts]
        resumes = any(len(turn.ids) for turn in interrupted)
        turns = self._engine.submit(prompts, sampling, interrupted if resumes else None)
        for conversation, turn in zip(conversations, turns, strict=True):
            conversation.turn = turn
            turn.add_done_callback(partial(self._notify, self._end_turns, conversation))

    def _notify(self, handler: Handler, conversation: _Conversation, future: "Future[Any]") -> None:
        self._events.post(handler, [conversation])

    def _fail(self, conversations: list[_Conversation], error: BaseException) -> None:
        if not isinstance(error, EngineError | UserError):
            cause, error = error, EngineError(f"conversations: {first_line(error)}.")
            error.__cause__ = cause
        for conversation in conversations:
            if self._live.pop(conversation.future, None) is not None:
                conversation.future.set_exception(error)

    def _count_tokens(self, number: int) -> None:
        self._tokens_each += number / max(1, len(self._live))
