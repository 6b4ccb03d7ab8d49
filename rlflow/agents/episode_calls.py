"""The calls of an engine's episodes: from the record, or generated."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlflow.agents.call_generator import CallGenerator
from rlflow.agents.episode import Episode
from rlflow.agents.messages import Call, CancelCall, Refusal, Reply
from rlflow.agents.record import CallName, RecordedCall
from rlflow.engines.serving.sessions import SessionEngine

EndedCall = tuple[Episode, CallName, "Future[Any]"]


class EpisodeCalls:
    """The calls of an engine's episodes. One thread calls the methods."""

    def __init__(
        self,
        engine: SessionEngine,
        max_calls: int,
        episodes: Mapping[str, Episode],
        answer: Callable[[Sequence[Reply | Refusal]], None],
        note_end: Callable[[Episode, CallName, "Future[Any]"], None],
    ) -> None:
        """Generate by ``engine``. ``answer`` gets answers to calls of ``episodes``.

        Other threads call ``note_end`` with calls that the engine has generated, which ``end`` takes.
        """
        self._engine, self._max_calls, self._episodes = engine, max_calls, episodes
        self._generator = CallGenerator(engine)
        self._answer, self._note_end = answer, note_end
        self.tokens_each = 0.0
        """The mean number of sampled tokens so far of an episode that was there all the time."""

    def take(self, calls: Sequence[Call]) -> None:
        """Answer calls from the record, or generate what they ask for."""
        new: list[tuple[Episode, CallName]] = []
        answers: list[Reply | Refusal] = []
        for call in calls:
            episode = self._episodes.get(call.episode)
            if episode is None:
                answers.append(Refusal(call.number, "ended", "the episode has ended"))
                continue
            record, ids = episode.record, np.frombuffer(call.prompt_ids, np.int32)
            name = record.name_of(call.prompt_ids, call.max_tokens, call.is_repeated)
            if name not in record.used and len(record.used) >= self._max_calls:
                episode.is_refused = True
                fact = f"the episode has made its {len(record.used)} calls (max_calls)"
                answers.append(Refusal(call.number, "calls", fact))
                continue
            record.used[name], episode.is_refused = None, False
            recorded = record.calls.get(name, RecordedCall())
            now = time.monotonic()
            wait_s = 0.0 if episode.waiting else now - episode.idle_since
            record.calls[name] = replace(recorded, prompt_ids=ids, limit=call.max_tokens, asked_at=now, wait_s=wait_s)
            episode.numbers[call.number] = name
            if recorded.result.is_done:
                episode.measures["recorded_calls"] += 1
                episode.idle_since = now
                answers.append(_reply(call.number, recorded))
                continue
            episode.waiting.setdefault(name, []).append(call.number)
            if name not in episode.generating and episode.is_live:
                new.append((episode, name))
        self._answer(answers)
        self.generate(list(dict.fromkeys(new)))

    def generate(self, calls: Sequence[tuple[Episode, CallName]]) -> None:
        """Have the engine generate calls. Raises EngineError."""
        requests = [episode.request(name) for episode, name in calls]
        futures = self._generator.submit(requests)
        for (episode, name), request, future in zip(calls, requests, futures, strict=True):
            episode.generating[name] = request, future
            future.add_done_callback(partial(self._note_end, episode, name))

    def end(self, ended: Sequence[EndedCall]) -> None:
        """Record what is generated, and answer those who wait for it."""
        new = [
            (episode, name, episode.generating.pop(name)[0], future)
            for episode, name, future in ended
            if episode.generating.get(name, (None, None))[1] is future
        ]
        results = self._generator.results([request for _, _, request, _ in new], [future for *_, future in new])
        answers = []
        for (episode, name, request, _), result in zip(new, results, strict=True):
            asked = episode.record.calls[name]
            recorded = replace(asked, result=result, reply_s=time.monotonic() - asked.asked_at)
            episode.record.calls[name] = recorded
            self.tokens_each += (len(result.reply.ids) - len(request.partial.ids)) / max(1, len(self._episodes))
            if result.is_done:
                episode.idle_since = time.monotonic()
                answers += [_reply(number, recorded) for number in episode.waiting.pop(name, ())]
        self._answer(answers)

    def cancel(self, cancelled: Sequence[CancelCall]) -> None:
        """Stop generating what nobody waits for. What there is of it stays, in case that the client asks again."""
        numbers = {call.number for call in cancelled}
        for episode in self._episodes.values():
            for number in numbers & episode.numbers.keys():
                name = episode.numbers[number]
                waiting = episode.waiting.get(name, [])
                if number in waiting:
                    waiting.remove(number)
                if not waiting:
                    episode.waiting.pop(name, None)
                    episode.idle_since = time.monotonic()
                    self.stop([(episode, name)] if name in episode.generating else [])

    def stop(self, calls: Sequence[tuple[Episode, CallName]]) -> None:
        """Stop generating calls, and record what there is of them."""
        futures = [episode.generating[name][1] for episode, name in calls]
        self._engine.abort([future for future in futures if not future.done()])
        self.end([(*call, future) for call, future in zip(calls, futures, strict=True)])


def _reply(number: int, call: RecordedCall) -> Reply:
    result = call.result
    return Reply(number, result.reply.ids.tobytes(), result.reply.logprobs.tobytes(), result.finished)
