"""Episodes that end at a limit of the recipe, or with their process."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.agents.agent_engine import AgentEngine
from rlflow.agents.base import Client, LimitReachedError, WorkerBrokenError
from rlflow.agents.options import AgentOptions
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.errors import RecipeError
from rlflow.recipe import Model
from rlflow.rewards.base import Row
from tests.helpers import WritingEngine, prompts, spec

HERE = "tests.unit.agents.test_agent_engine_ends"


async def fail_at_the_limit(client: Client, row: Row) -> float:
    """Ask until a call is refused, and fail as programs do whose library raises."""
    try:
        while True:
            await client.chat([{"role": "user", "content": "go on"}])
            client.give_reward(0.25)
    except LimitReachedError as error:
        raise RuntimeError("the library has no answer") from error


async def go_on_after_a_limit(client: Client, row: Row) -> float:
    """Ask too much, and then less."""
    with suppress(LimitReachedError):
        await client.chat([{"role": "user", "content": "go on" * 200}])
    await client.chat([{"role": "user", "content": "go on"}])
    return 1.0


async def fail_at_once(client: Client, row: Row) -> float:
    await client.chat([{"role": "user", "content": "go on"}])
    raise RuntimeError("it is broken")


async def break_the_first_process(client: Client, row: Row) -> float:
    await client.chat([{"role": "user", "content": "go on"}])
    with suppress(FileExistsError):
        Path(row["flag"]).touch(exist_ok=False)
        raise WorkerBrokenError("its server has ended")
    return 1.0


def rollouts(function: str, **row: str) -> Any:
    engine = WritingEngine(spec("rollout", capabilities=("Generates",)))
    engine.tokenizer = new_tokenizer(Model(random_weights=True, tokenizer="bytes"))
    options = AgentOptions(environment=f"{HERE}:{function}", max_calls=2, turn_tokens=4, max_tokens=512, processes=1)
    agents = AgentEngine(engine, options)
    sampling, samples = Sampling(max_tokens=512), replace(prompts((3, 5)), rows=(row, row))
    return agents.rollouts(samples, [future.result(60) for future in agents.submit(samples, sampling)], sampling)


@pytest.mark.slow
def test_a_program_that_fails_at_a_limit_is_cut_and_keeps_its_rewards() -> None:
    ended = rollouts("fail_at_the_limit")
    assert not np.any(ended.finished)
    assert ended.turn_rewards.values.tolist() == [0.25] * 4
    assert [dict(measures)["retries"] for measures in ended.measures] == [0, 0]
    assert list(ended.reasons) == ["", ""]


@pytest.mark.slow
def test_a_program_that_asks_for_less_after_a_limit_is_not_cut() -> None:
    assert np.all(rollouts("go_on_after_a_limit").finished)


@pytest.mark.slow
def test_a_program_that_fails_below_its_limits_is_a_failure() -> None:
    with pytest.raises(RecipeError, match="it is broken"):
        rollouts("fail_at_once")


@pytest.mark.slow
def test_a_process_that_an_agent_calls_broken_is_replaced(tmp_path: Path) -> None:
    ended = rollouts("break_the_first_process", flag=str(tmp_path / "flag"))
    assert np.all(ended.finished)
    assert sum(measures["retries"] for measures in ended.measures) >= 1
