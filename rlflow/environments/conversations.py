"""Conversations of a model with an environment, on any engine that generates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Generates, Sampling
from rlflow.environments.conversation_engine import ConversationEngine
from rlflow.environments.exchange import Exchange
from rlflow.environments.options import TurnOptions
from rlflow.environments.transcript import Transcript, build_conversations, turn_prompts

# The exchanges of the engines in this process, which live as long as their engines.
_EXCHANGES: "WeakKeyDictionary[Any, list[tuple[TurnOptions, Exchange]]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class EnvironmentTurns:
    """Turns in which an environment answers the model (``engines.base.Turns``)."""

    options: TurnOptions
    limit_includes_prompt: ClassVar[bool] = False

    def session_engine(self, engine: Any) -> ConversationEngine:
        """Return an engine of conversations. Each goes on as soon as its own environment has answered."""
        return ConversationEngine(engine, Exchange(self.options, engine.tokenizer))

    def generate(self, engine: Generates, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return conversations whose turns the engine generates, one batch of turns after another.

        All conversations take their turns together, so that the batches of the engine, and with them the last bits of
        its results, do not depend on how long an environment takes.
        """
        exchange = self._exchange(engine)
        turn_sampling = exchange.turn_sampling(sampling)
        samples = prompts.repeat(sampling.group_size)
        transcripts = [Transcript() for _ in range(len(samples))]
        first_turns = engine.generate(prompts, replace(turn_sampling, group_size=sampling.group_size))
        _add_turns(exchange, transcripts, first_turns)
        while True:
            _answer(exchange, samples, transcripts)
            rows = [row for row, transcript in enumerate(transcripts) if not transcript.is_done]
            if not rows:
                return build_conversations(samples, transcripts, sampling.scoring_temperature)
            speaking = [transcripts[row] for row in rows]
            next_prompts = turn_prompts(samples.keys[rows], [samples.ids[row] for row in rows], speaking)
            _add_turns(exchange, speaking, engine.generate(next_prompts, turn_sampling))

    def _exchange(self, engine: Any) -> Exchange:
        opened = _EXCHANGES.setdefault(engine, [])
        for options, exchange in opened:
            if options == self.options:
                return exchange
        opened.append((self.options, Exchange(self.options, engine.tokenizer)))
        return opened[-1][1]


def _add_turns(exchange: Exchange, transcripts: Sequence[Transcript], turns: Rollouts) -> None:
    for row, transcript in enumerate(transcripts):
        exchange.add_turn(transcript, turns, row)


def _answer(exchange: Exchange, samples: Prompts, transcripts: Sequence[Transcript]) -> None:
    """Wait for the environment's answer in all conversations where one is due."""
    rows = [row for row, transcript in enumerate(transcripts) if transcript.is_answer_due]
    asking = [transcripts[row] for row in rows]
    futures = exchange.ask(asking, [samples.rows[row] for row in rows])
    exchange.add_answers((transcript, future.result()) for transcript, future in zip(asking, futures, strict=True))
