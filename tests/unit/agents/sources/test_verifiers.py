"""Tasksets of verifiers: episodes with its own training client, against an endpoint that speaks its protocol."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow.agents.base import Outcome
from rlflow.agents.load import load_agent
from rlflow.data.source import load_rows
from rlflow.errors import RecipeError
from rlflow.recipe import Data
from tests.unit.agents.scripted import ScriptedClient, play
from tests.unit.agents.stub_endpoint import StubEndpoint

SUMS = "verifiers:example_taskset"
QWEN: dict[str, Any] = {"renderer": {"name": "qwen3", "enable_thinking": False}}
# The import of the library takes four seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def taskset_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example at the top level, where verifiers looks for tasksets, and its servers too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def rows(split: str = "train", **options: Any) -> Sequence[Any]:
    return load_rows(Data(source=SUMS, options=options, split=split, batch_size=1, max_prompt_tokens=8), "split")


def run(
    folder: Path, answer: Callable[[str], str | None], chosen: Sequence[Any], name: str = SUMS, **options: Any
) -> tuple[list[Any], StubEndpoint, list[ScriptedClient]]:
    """Run one episode for each row, all at the same time; return outcomes or errors, the endpoint and the clients."""

    async def episodes() -> tuple[list[Any], StubEndpoint, list[ScriptedClient]]:
        endpoint = StubEndpoint(folder, answer)
        agent = load_agent(name, options)
        await agent.open(await endpoint.start())
        clients = [ScriptedClient() for _ in chosen]
        try:
            episodes = (agent.run(client, row) for client, row in zip(clients, chosen, strict=True))
            return await asyncio.gather(*episodes, return_exceptions=True), endpoint, clients
        finally:
            await agent.close()
            await endpoint.runner.cleanup()

    return asyncio.run(episodes())


def test_rows_hold_the_task_and_are_split() -> None:
    train, test = rows(taskset={"count": 200}), rows("test", taskset={"count": 200})
    assert len(train) + len(test) == 200
    assert 5 < len(test) < 40
    assert rows(size=20)[0] == {
        "prompt": "0+1?",
        "task": {"idx": 0, "prompt": "0+1?", "system_prompt": "Add.", "answer": 1},
    }


def test_episodes_earn_the_rewards_of_the_task(tmp_path: Path) -> None:
    chosen = rows(size=20)[:8]

    def answer(prompt: str) -> str:
        return str(int(re.findall(r"(\d+)\+1\?", prompt)[-1]) // 4 * 4 + 1)

    outcomes, endpoint, clients = run(tmp_path, answer, chosen, **QWEN)
    for row, outcome in zip(chosen, outcomes, strict=True):
        is_right = float(row["task"]["idx"] % 4 == 0)
        assert isinstance(outcome, Outcome), outcome
        assert outcome.reward == is_right + 0.5
        assert outcome.finished
        assert outcome.metrics.items() >= {"is_right": is_right, "is_number": 0.5, "turns": 1, "tool_calls": 0}.items()
    assert "<|im_start|>system\nAdd.<|im_end|>" in endpoint.calls[0][1]
    # Each episode has told its name before its first call.
    assert sorted(name for name, _ in endpoint.calls) == sorted(name for client in clients for name in client.names)


def test_tools_of_the_taskset_are_called(tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        if "<tool_response>" in prompt.rpartition("<|im_start|>user")[2]:
            return str(re.findall(r"<tool_response>\n(\d+)", prompt)[-1])
        return '<tool_call>\n{"name": "sums_add", "arguments": {"a": 3, "b": 1}}\n</tool_call>'

    row = {"task": {"idx": 3, "prompt": "3+1?", "answer": 4}}
    [outcome], endpoint, _ = run(tmp_path, answer, [row], taskset={"has_tools": True}, **QWEN)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.reward == 1.5
    assert outcome.metrics["tool_calls"] == 1
    first, second = (prompt for _, prompt in endpoint.calls)
    assert second.startswith(first)


def test_a_limit_ends_the_episode_with_its_reward_so_far(tmp_path: Path) -> None:
    [outcome], _, _ = run(tmp_path, lambda prompt: None, rows(size=20)[:1], **QWEN)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.reward == 0
    assert not outcome.finished


def test_an_error_of_the_task_is_no_outcome(tmp_path: Path) -> None:
    row = {"task": {"idx": 0, "prompt": "0+1?", "answer": -1}}
    [error], _, _ = run(tmp_path, lambda prompt: "1", [row], **QWEN)
    assert isinstance(error, RuntimeError)
    assert "TaskError" in str(error)
    assert "no such sum" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"harness": "bash"}, r"options\.harness: with the harness 'bash', the model could execute code"),
        ({"harness": "codex"}, r"options\.harness: with the harness 'codex', the model could execute code"),
        ({"harness": "nul"}, r"options\.harness: no harness 'nul'"),
        ({"tasket": {}}, r"options\.tasket: unknown key"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_agent(SUMS, options)


def test_an_environment_may_answer_the_model(tmp_path: Path) -> None:
    """Each of its answers starts the chat again, with the messages so far: the tokens continue those before."""

    def answer(prompt: str) -> str | None:
        return {0: "one", 1: "three"}.get(prompt.count("go on"))

    game = "verifiers:example_game"
    data = Data(source=game, options={"size": 20}, batch_size=1, max_prompt_tokens=8)
    [outcome], endpoint, _ = run(tmp_path, answer, load_rows(data, "split")[:1], game, **QWEN)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.reward == len("three")
    assert not outcome.finished
    first, second, third = (prompt for _, prompt in endpoint.calls)
    assert second.startswith(f"{first}one<|im_end|>")
    assert third.startswith(f"{second}three<|im_end|>")
    assert len({name for name, _ in endpoint.calls}) == 1
    with pytest.raises(RecipeError, match="the taskset has no end, so it needs a size"):
        load_rows(replace(data, options={}), "split")


def test_a_taskset_must_exist_and_have_one_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="taskset 'nothing' not found"):
        play(load_agent("verifiers:nothing", {}), ScriptedClient(), {})
    (tmp_path / "example_duel.py").write_text(
        "import verifiers.v1 as vf\nfrom example_game import GameConfig, GameEnv, GameTaskset\n"
        "class DuelConfig(GameConfig): other: vf.AgentConfig = vf.AgentConfig()\n"
        "class DuelEnv(vf.Env[DuelConfig]): run = GameEnv.run\n"
        "__all__ = ['DuelEnv', 'GameTaskset']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RecipeError, match="expected a taskset for one agent, got 'example_duel' for player, other"):
        play(load_agent("verifiers:example_duel", {}), ScriptedClient(), {})
