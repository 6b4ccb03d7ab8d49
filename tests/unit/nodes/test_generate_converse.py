"""Conversations: who wrote what, when they end, and what becomes of an environment that fails."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Conversations, Logprobs, Packed, Prompts, Repeated, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.fake import FakeEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.advantages import TeacherAdvantage
from rlflow.nodes.generate import Converse, Generate
from rlflow.nodes.reward import Reward, SummedRewards
from rlflow.nodes.scoring import RewardModel
from rlflow.recipe import Model
from rlflow.rewards.callables import RewardTerm
from tests.helpers import MODEL, keys, prompts, spec
from tests.unit.environments import echo

ECHO = f"{echo.__name__}:Echo"
TOKENIZER = load_tokenizer("policy", MODEL)
END = TOKENIZER.eos_token_id
GIVEN = prompts((3, 5))
# The tokenizer of MODEL has 0 for the end, 1 to 10 for digits, 11 for "+" and 12 for "=".
PLUS = 11


class Scripted:
    """An engine that writes what it is told, by turn and then by the place among those asked; ``|`` is the end token.

    A turn has logprobs of its own and its own version.
    """

    def __init__(self, *turns: Sequence[str]) -> None:
        self.turns = list(turns)
        self.asked: list[Prompts] = []
        self.samplings: list[Sampling] = []
        self.tokenizer = TOKENIZER

    def generate(self, given: Prompts, sampling: Sampling) -> Rollouts:
        if sampling.turns is not None:
            return sampling.turns.generate(self, given, sampling)
        self.asked.append(given)
        self.samplings.append(sampling)
        texts, turn = self.turns[len(self.asked) - 1], len(self.asked)
        samples = given.repeat(sampling.group_size)
        ids = Packed.from_rows([encoded(text) for text in texts], np.int32)
        assert len(texts) == len(samples)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=ids,
            logprobs=ids.like(np.full(len(ids.values), -turn, np.float32)),
            versions=Repeated(np.full(len(ids), turn, np.int32), ids.lengths),
            finished=np.array([text[-1] in "|+" for text in texts]),
            temperature=1.0,
            texts=tuple(text.replace("|", "") for text in texts),
            rows=samples.rows,
        )


def encoded(text: str) -> list[int]:
    return [END if character == "|" else CHARACTER[character] for character in text]


CHARACTER: Mapping[str, int] = {each: TOKENIZER.convert_tokens_to_ids(each) for each in "0123456789+="}


def converse(**options: Any) -> Converse:
    given: dict[str, Any] = {"environment": ECHO, "max_turns": 3, "turn_tokens": 4, "max_tokens": 20, "group_size": 1}
    return Converse(**given | options)


def conversations(engine: Any, node: Converse, last: Sequence[str] = ("9", "9")) -> Conversations:
    given = replace(GIVEN, rows=tuple({"last": text} for text in last))
    return node.run(engine, given)


def rows(column: Packed) -> list[list[Any]]:
    return [column[row].tolist() for row in range(len(column))]


def test_the_model_and_the_environment_write_in_turn() -> None:
    engine = Scripted(["12|", "9|"], ["3|"], ["9|"])
    out = conversations(engine, converse(frame="={}+"))
    assert rows(out.response_ids) == [encoded("12|=1+3|=22+9|"), encoded("9|")]
    assert rows(out.turn) == [[0] * 3 + [-1] * 3 + [1] * 2 + [-1] * 4 + [2] * 2, [0] * 2]
    assert rows(out.logprobs) == [[-1] * 3 + [0] * 3 + [-2] * 2 + [0] * 4 + [-3] * 2, [-1] * 2]
    assert rows(out.versions) == [[1] * 6 + [2] * 6 + [3] * 2, [1] * 2]
    assert out.own_lengths.tolist() == [7, 2]
    assert (out.finished.tolist(), out.turn_rewards.lengths.tolist(), out.reasons.tolist()) == (
        [True, True],
        [3, 1],
        ["", ""],
    )
    assert out.texts == ("9", "9")
    assert [row["environment_reward"] for row in out.rows] == [0.75, 0.25]
    assert out.keys.tolist() == keys(2).tolist()
    assert rows(out.prompt_ids) == rows(GIVEN.ids)


def test_each_turn_reads_all_before_it_under_keys_of_its_own() -> None:
    engine = Scripted(["1|", "2|"], ["3|", "9|"], ["9|"])
    conversations(engine, converse())
    first, second, third = engine.asked
    assert rows(second.ids) == [GIVEN.ids[0].tolist() + encoded("1|1"), GIVEN.ids[1].tolist() + encoded("2|1")]
    assert rows(third.ids) == [GIVEN.ids[0].tolist() + encoded("1|13|22")]
    assert first.keys.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert second.keys.tolist() == [[0, 2**40, 0], [0, 2**40 + 2**20, 0]]
    assert third.keys.tolist() == [[0, 2**41, 0]]


def test_the_rounds_of_a_step_have_keys_of_their_own() -> None:
    """Prompts of a second round are numbered on from those of the first."""
    engine = Scripted(["1|", "2|"], ["9|", "9|"])
    later = replace(GIVEN, keys=GIVEN.keys + np.array([0, 2, 0]), rows=({"last": "9"},) * 2)
    converse().run(engine, later)
    assert engine.asked[1].keys[:, 1].tolist() == [2**40 + 2 * 2**20, 2**40 + 3 * 2**20]


def test_a_group_shares_its_first_turn_and_then_differs() -> None:
    engine = Scripted(["1|", "9|", "2|", "9|"], ["9|", "9|"])
    out = conversations(engine, converse(group_size=2, stop=("+",)))
    assert [(each.group_size, each.max_tokens, each.stop_ids) for each in engine.samplings] == [
        (2, 4, (PLUS,)),
        (1, 4, (PLUS,)),
    ]
    assert out.keys.tolist() == keys(2, 2).tolist()
    assert rows(out.response_ids) == [encoded(text) for text in ("1|19|", "9|", "2|19|", "9|")]


@pytest.mark.parametrize(
    ("options", "response", "turns"),
    [
        ({"max_turns": 1}, "1|", 1),
        ({"max_turns": 2}, "1|12|", 2),
        # 2 + 1 + 4 of the next turn have room in 7 tokens, and 2 + 1 + 2 + 2 + 4 in 11.
        ({"max_tokens": 6}, "1|", 1),
        ({"max_tokens": 7}, "1|12|", 2),
        ({"max_tokens": 11}, "1|12|229|", 3),
    ],
)
def test_limits_cut_a_conversation(options: Mapping[str, int], response: str, turns: int) -> None:
    engine = Scripted(["1|", "9|"], ["2|"], ["9|"])
    out = conversations(engine, converse(**options))
    assert out.response_ids[0].tolist() == encoded(response)
    assert out.finished.tolist() == [turns == 3, True]
    assert out.turn_rewards.lengths.tolist() == [turns, 1]


def test_an_answer_may_be_empty() -> None:
    """A guess without a number is answered by nothing."""
    node = converse(environment="guessing", options={"higher": "=", "lower": "+"})
    given = replace(GIVEN, rows=({"number": 3}, {"number": 4}))
    engine = Scripted(["+|", "2|"], ["3|", "4|"])
    out = node.run(engine, given)
    assert rows(out.response_ids) == [encoded("+|3|"), encoded("2|=4|")]
    assert rows(out.take(np.array([1, 0])).turn) == [[0, 0, -1, 1, 1], [0, 0, 1, 1]]
    assert out.own_lengths.tolist() == [4, 4]
    assert out.finished.all()


def test_a_turn_that_is_cut_ends_its_conversation() -> None:
    out = conversations(Scripted(["1234", "9|"]), converse())
    assert rows(out.response_ids) == [encoded("1234"), encoded("9|")]
    assert out.finished.tolist() == [False, True]
    assert out.rows[0]["environment_reward"] == 0


def test_a_conversation_whose_environment_fails_has_no_reward() -> None:
    out = conversations(Scripted(["1|", "1|"], ["13|", "9|"]), converse(on_failure="exclude"))
    reason = f"'{ECHO}' failed (RuntimeError: unlucky)"
    assert out.reasons.tolist() == [reason, ""]
    for part, expected in (
        (RewardTerm(function="environment"), 0.5),
        (RewardTerm(function="length", options={"max_characters": 5}), 0.0),
    ):
        rewards = Reward(functions={"it": part}).run(out)
        assert isinstance(rewards, SummedRewards)
        assert rewards.values.tolist() == [pytest.approx(float("nan"), nan_ok=True), expected]
        assert rewards.reasons.tolist() == [reason, ""]


def test_where_all_fail_the_run_ends_with_the_reason() -> None:
    out = conversations(Scripted(["13|", "13|"]), converse(on_failure="exclude"))
    with pytest.raises(EngineError, match=r"none of 2 responses has one: '.*Echo' failed \(RuntimeError: unlucky\)"):
        Reward(function="environment").run(out).mean()


def test_of_a_conversation_whose_environment_fails_no_model_says_anything() -> None:
    out = conversations(Scripted(["1|", "1|"], ["13|", "9|"]), converse(on_failure="exclude"))
    judged = RewardModel().run(FakeEngine(spec()), out)
    assert np.isnan(judged.values).tolist() == [True, False]
    taught = TeacherAdvantage().run(out, Logprobs(values=out.logprobs))
    assert taught.is_included.tolist() == [False, True]


def test_a_failure_may_end_the_run() -> None:
    with pytest.raises(RecipeError, match=r"^environment: '.*Echo' failed \(RuntimeError: unlucky\)"):
        conversations(Scripted(["13|", "9|"]), converse())


def test_what_looks_like_a_special_token_is_text() -> None:
    """The same text in the frame is a special token."""
    model = replace(MODEL, characters="0123456789+=<|end>")
    node = converse(environment="guessing", options={"higher": "<|end|>"}, frame="<|end|>{}+", max_tokens=40)
    given = replace(GIVEN, rows=({"number": 3}, {"number": 1}))
    engine = Scripted(["1|", "1|"], ["3|"])
    engine.tokenizer = load_tokenizer("policy", model)
    out = node.run(engine, given)
    said = load_tokenizer("policy", model)(list("<|end|>"))["input_ids"]
    assert out.response_ids[0].tolist() == [*encoded("1|"), END, *(token for (token,) in said), PLUS, *encoded("3|")]


def test_a_chat_model_reads_answers_as_messages_of_the_user() -> None:
    chat = load_tokenizer("policy", Model(random_weights=True, tokenizer="bytes"))
    engine = Scripted(["1|", "9|"], ["9|"])
    engine.tokenizer = chat
    out = conversations(engine, converse(frame="chat", max_tokens=60))
    answer = chat("\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert out.response_ids[0].tolist() == [*encoded("1|"), *answer, *encoded("9|")]
    with pytest.raises(RecipeError, match=r"^frame: the tokenizer's chat template cannot be used"):
        conversations(Scripted(["1|", "9|"]), converse(frame="chat"))


def test_what_the_tokenizer_does_not_know() -> None:
    with pytest.raises(RecipeError, match=r"^environment: the tokenizer refuses the output of '.*Echo'"):
        conversations(Scripted(["1|", "9|"]), converse(frame="<{}>"))
    with pytest.raises(RecipeError, match=r"^stop: expected a single token, got '\+=', which is 2"):
        conversations(Scripted(["1|", "9|"]), converse(stop=("+=",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turn_tokens": 21}, "turn_tokens: 21 is more than max_tokens, which is 20"),
        ({"turn_tokens": 20}, "turn_tokens: 20 is all of max_tokens, so that no conversation has a second turn"),
        ({"frame": "="}, "frame: expected 'chat' or one '{}', got '='"),
        ({"frame": "chat", "stop": ("+",)}, "stop: a turn of a chat ends with the model's own end token"),
        ({"environment": "calc"}, "environment: no environment 'calc'"),
        ({"options": {"loud": True}}, "options.loud: unknown key"),
    ],
)
def test_options_that_do_not_go(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        converse(**options).check(frozenset())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", [FakeEngine, pytest.param(TransformersEngine, marks=pytest.mark.slow)])
def test_a_single_turn_is_what_generate_writes(kind: type[FakeEngine] | type[TransformersEngine]) -> None:
    plain = Generate(group_size=3, max_tokens=6)
    node = converse(group_size=3, max_tokens=6, turn_tokens=6, max_turns=1)
    given = replace(GIVEN, rows=({"last": "x"},) * 2)
    expected = plain.run(kind(spec()), given)
    out = node.run(kind(spec()), given)
    for column in ("response_ids", "logprobs", "versions", "prompt_ids"):
        assert rows(getattr(out, column)) == rows(getattr(expected, column)), column
    assert not out.turn.values.any()
    assert out.texts == expected.texts


def test_draws_differ_from_turn_to_turn() -> None:
    """The same sample draws anew even after the same words."""
    engine = Scripted(["1|", "2|"], ["9|", "9|"])
    conversations(engine, converse())
    same = [replace(asked, ids=Packed.from_rows([GIVEN.ids[0]] * 2, np.int32)) for asked in engine.asked]
    model = TransformersEngine(spec())
    first, second = (rows(model.generate(asked, Sampling(max_tokens=8)).response_ids) for asked in same)
    assert first[0] != second[0]
    assert first[1] != second[1]
