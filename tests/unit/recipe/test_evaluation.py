"""Several responses to a held-out prompt, and several sets of held-out prompts."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import rlflow
from rlflow.compiler.continuation import experiment_of
from rlflow.data.loading import load_held_out
from rlflow.errors import UserError
from rlflow.recipe import Data
from rlflow.recipe.evaluation import Evaluation, EvaluationSet, pass_at_k, pass_metrics
from tests.conftest import CONFIG_DIR
from tests.helpers import load
from tests.unit.data.test_source import write


def test_pass_at_k_is_the_share_of_all_draws_with_a_response_that_passes() -> None:
    for number in range(1, 7):
        for passed in range(number + 1):
            responses = [index < passed for index in range(number)]
            for k in range(1, number + 1):
                draws = [any(draw) for draw in combinations(responses, k)]
                assert pass_at_k(number, passed, k) == pytest.approx(sum(draws) / len(draws))


def test_responses_without_a_reward_do_not_count() -> None:
    """Two of three responses pass, and one of four. Two draws contain a pass always, and in half of the cases."""
    rewards = np.array([1.0, 0.2, np.nan, 0.5, 0.0, 0.7, 0.4, 0.1], np.float32)
    metrics = pass_metrics(rewards, np.repeat([0, 1], 4), 0.5)
    assert metrics == pytest.approx({"pass_at_1": (2 / 3 + 1 / 4) / 2, "pass_at_2": (1 + 1 / 2) / 2, "pass_at_4": 1.0})


def test_k_is_each_power_of_two_and_the_number_of_responses() -> None:
    assert list(pass_metrics(np.zeros(6), np.zeros(6, np.int64), 1.0)) == [f"pass_at_{k}" for k in (1, 2, 4, 6)]


def test_a_set_has_rows_of_its_own(tmp_path: Path) -> None:
    """The second set is another file with other columns; the first reads the data of training."""
    own = write(tmp_path / "own.jsonl", [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(9)])
    other = write(tmp_path / "other.jsonl", [{"prompt": "1+1=", "text": "2"}, {"prompt": "2+2=", "text": "4"}])
    columns = {"prompt": "question"}
    data = Data(source=str(own), batch_size=1, max_prompt_tokens=8, columns=columns, eval_split="train[5:]")
    sets = {
        "few": EvaluationSet(split="train[:3]", num_prompts=2),
        "other": EvaluationSet(source=str(other), split="train", columns={"answer": "text"}),
    }
    held_out = load_held_out(data, Evaluation(every=1, num_prompts=3, sets=sets))
    prompts = {name: [(row["prompt"], row["answer"]) for row in rows] for name, (_, rows) in held_out.items()}
    assert prompts == {
        "": [("5+1=", "6"), ("6+1=", "7"), ("7+1=", "8")],
        "few": [("0+1=", "1"), ("1+1=", "2")],
        "other": [("1+1=", "2"), ("2+2=", "4")],
    }


@pytest.mark.parametrize(
    ("evaluation_set", "message"),
    [
        (EvaluationSet(split="hard"), "evaluation.sets.mine.split: 'hard' of "),
        (EvaluationSet(split="train", columns={"prompt": "q"}), "evaluation.sets.mine.columns.prompt: no column 'q'"),
        (EvaluationSet(split="train", source="gone.jsonl"), "evaluation.sets.mine.source: 'gone.jsonl' does not exist"),
    ],
)
def test_an_error_names_the_set(evaluation_set: EvaluationSet, message: str, tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", [{"prompt": "1+1="}])
    data = Data(source=str(own), batch_size=1, max_prompt_tokens=8)
    with pytest.raises(UserError) as raised:
        load_held_out(data, Evaluation(every=1, num_prompts=3, sets={"mine": evaluation_set}))
    assert str(raised.value).startswith(message)
    assert "data." not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("recipe=dpo_tiny", "evaluation.num_responses=4"), "evaluation.num_responses: pairs are given, and no resp"),
        (("evaluation.temperature=0.6",), "evaluation.temperature: a single response has the likeliest tokens"),
        ((f"evaluation.sets.{'a' * 101}.split=test",), "evaluation.sets: 'aaa"),
        (("evaluation.sets.mine={split: x, source: 'os:system'}",), "evaluation.sets.mine.source: 'os:system': 'os' b"),
        (("data.eval_split=null",), "data.eval_split: is missing, and evaluation needs it"),
    ],
)
def test_options_without_a_meaning_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as raised:
        rlflow.compile(load(*overrides), "local")
    assert str(raised.value).startswith(message)


def test_the_plan_counts_all_responses_of_all_sets() -> None:
    recipe = load("evaluation.num_responses=4", "evaluation.sets.one={split: test, num_prompts: 20, num_responses: 1}")
    tasks = rlflow.compile(recipe, "local").workload.evaluation
    assert [(task.node, task.samples, task.group_size) for task in tasks] == [
        ("rollouts", 2000, 4),
        ("rewards", 2000, 4),
        ("rollouts", 20, 1),
        ("rewards", 20, 1),
    ]


def test_only_options_that_are_set_belong_to_the_experiment() -> None:
    assert experiment_of(load())["evaluation"] == {"every": 25, "num_prompts": 500}
    more = experiment_of(load("evaluation.num_responses=4"))["evaluation"]
    assert more == {"every": 25, "num_prompts": 500, "num_responses": 4}


@pytest.mark.slow
def test_a_run_measures_each_set(tmp_path: Path) -> None:
    """Rewards are 0 or 1, so the mean of all responses is pass@1. The report has the mean of the set without a name."""
    reward = "graph.rewards.function='tests.integration.reward_functions:even'"
    sets = "evaluation.sets.one={split: test, num_prompts: 5, num_responses: 1}"
    overrides = ("recipe=fake", "steps=2", "evaluation.num_responses=4", reward, sets)
    report = rlflow.run(rlflow.compile(load(*overrides, config_dir=CONFIG_DIR), "local"), tmp_path, observers=())
    first, *_ = [line for line in report.history() if "evaluation/mean_at_4" in line]
    assert first.keys() == {"step"} | {
        f"evaluation/{name}" for name in ("mean_at_4", "pass_at_1", "pass_at_2", "pass_at_4", "one/reward")
    }
    assert 0 < first["evaluation/mean_at_4"] == pytest.approx(first["evaluation/pass_at_1"])
    assert first["evaluation/pass_at_1"] < first["evaluation/pass_at_2"] < first["evaluation/pass_at_4"] <= 1
    assert report.eval_before == first["evaluation/mean_at_4"]
    # Each of the five rewards is 0 or 1.
    assert first["evaluation/one/reward"] in (0, 0.2, 0.4, 0.6, 0.8, 1)
