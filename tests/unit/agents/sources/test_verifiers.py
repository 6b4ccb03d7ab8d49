"""Tasksets of verifiers: episodes against the endpoint, by chats and by verifiers' own client for training."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import aiohttp
import pytest

from rlflow.agents.base import Client, ModelService, Outcome
from rlflow.agents.load import load_agent
from rlflow.agents.messages import Call, Refusal, StartEpisode
from rlflow.agents.worker import AgentSpec
from rlflow.agents.worker_process import AgentWorker
from rlflow.data.loading import load_rows
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.errors import RecipeError
from rlflow.recipe import Data, Model
from rlflow.rewards.workers import ForkServer
from tests.unit.agents.endpoint.conftest import ScriptedEngine, ids_of, show, words
from tests.unit.agents.scripted import ScriptedClient, play

SUMS = "verifiers:example_taskset"
GAME = "verifiers:example_game"
LETTERS = "verifiers:one_behind"
EXAMPLES = Path(__file__).parents[4] / "examples" / "verifiers"
RENDERERS: dict[str, dict[str, Any]] = {
    "chats": {},
    "tokens": {"renderer": {"name": "qwen3", "enable_thinking": False}},
}
# The import of the library takes four seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def tasksets_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the examples at the top level, where verifiers looks for tasksets, and its servers too."""
    for folder in (EXAMPLES, Path(__file__).parent):
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.setenv("RLFLOW_API_KEY", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    new_tokenizer(Model(tokenizer="bytes", random_weights=True)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ScriptedEngine]:
    """Start an endpoint for all tests of the file."""
    engine = ScriptedEngine()
    engine.start(folder)
    yield engine
    engine.endpoint.stop()


def rows(name: str = SUMS, split: str = "train", **options: Any) -> Sequence[Any]:
    return load_rows(Data(source=name, options=options, split=split, batch_size=1, max_prompt_tokens=8), "split")


def run(
    engine: ScriptedEngine, answer: Callable[[str], str | None], rows: Sequence[Any], name: str = SUMS, **options: Any
) -> list[Any]:
    """Run one episode for each row, all at the same time, and return outcomes or errors.

    ``answer`` returns the model's reply to a prompt, or None for a call beyond the limit.
    """

    def reply(call: Call) -> Sequence[int] | Refusal:
        text = answer(show(ids_of(call.prompt_ids)))
        return Refusal(call.number, "calls", "no more calls") if text is None else words(text)

    async def episodes() -> list[Any]:
        agent = load_agent(name, options)
        service = ModelService(engine.endpoint.url, "worker", engine.model)
        await agent.open(service)
        keys = [engine.open("worker")[1] for _ in rows]
        async with aiohttp.ClientSession() as http:
            running = [agent.run(Client(service, key, 0, http), row) for key, row in zip(keys, rows, strict=True)]
            try:
                return await asyncio.gather(*running, return_exceptions=True)
            finally:
                await agent.close()

    engine.calls.clear()
    engine.replies.clear()
    engine.answer = reply
    return asyncio.run(episodes())


def check_one_segment(engine: ScriptedEngine) -> None:
    """Check that each call continues the tokens of the one before."""
    prompts = [ids_of(call.prompt_ids) for call in engine.calls]
    for prompt, reply, following in zip(prompts, engine.replies, prompts[1:], strict=False):
        assert following[: len(prompt) + len(reply)] == prompt + reply


def test_rows_hold_the_task_and_are_split() -> None:
    train, test = rows(taskset={"count": 200}), rows(split="test", taskset={"count": 200})
    assert len(train) + len(test) == 200
    assert 5 < len(test) < 40
    assert rows(size=20)[0] == {
        "prompt": "0+1?",
        "task": {"idx": 0, "prompt": "0+1?", "system_prompt": "Add.", "answer": 1},
    }
    with pytest.raises(RecipeError, match="the taskset has no end, so it needs a size"):
        rows(GAME)


@pytest.mark.parametrize("options", RENDERERS.values(), ids=RENDERERS)
def test_episodes_earn_the_rewards_of_the_task(engine: ScriptedEngine, options: dict[str, Any]) -> None:
    chosen = rows(size=20)[:8]

    def answer(prompt: str) -> str:
        return str(int(re.findall(r"(\d+)\+1\?", prompt)[-1]) // 4 * 4 + 1)

    outcomes = run(engine, answer, chosen, **options)
    for row, outcome in zip(chosen, outcomes, strict=True):
        is_right = float(row["task"]["idx"] % 4 == 0)
        assert isinstance(outcome, Outcome), outcome
        assert outcome.reward == is_right + 0.5
        assert outcome.finished
        assert outcome.metrics.items() >= {"is_right": is_right, "is_number": 0.5, "turns": 1, "tool_calls": 0}.items()
    assert len({call.episode for call in engine.calls}) == 8
    assert "[<|im_start|>]system\nAdd.[<|im_end|>]" in show(ids_of(engine.calls[0].prompt_ids))


def test_right_replies_of_the_example_earn_their_share(engine: ScriptedEngine) -> None:
    def one_behind(prompt: str) -> str:
        letters = "".join(re.findall(r"user\n(?:\d\d: )?([a-z]+)", prompt))
        return letters[-2]

    def newest(prompt: str) -> str:
        return str(re.findall(r"user\n(?:\d\d: .)?([a-z])", prompt)[-1])

    chosen = rows(LETTERS)[:5]
    assert [len(row["task"]["letters"]) for row in chosen] == [4] * 5
    assert [outcome.reward for outcome in run(engine, one_behind, chosen, LETTERS)] == [1.0] * 5
    [outcome] = run(engine, newest, [{"task": {"prompt": "42: kd", "letters": "kdda"}}], LETTERS)
    assert outcome.reward == pytest.approx(1 / 3)


@pytest.mark.parametrize("options", RENDERERS.values(), ids=RENDERERS)
def test_tools_of_the_taskset_are_called(engine: ScriptedEngine, options: dict[str, Any]) -> None:
    def answer(prompt: str) -> str:
        if results := re.findall(r"\[<tool_response>\]\n(\d+)", prompt):
            return str(results[-1])
        return '<tool_call>\n{"name": "sums_add", "arguments": {"a": 3, "b": 1}}\n</tool_call>'

    row = {"task": {"idx": 3, "prompt": "3+1?", "answer": 4}}
    [outcome] = run(engine, answer, [row], taskset={"has_tools": True}, **options)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.reward == 1.5
    assert outcome.metrics["tool_calls"] == 1
    assert len(engine.calls) == 2
    check_one_segment(engine)


@pytest.mark.parametrize("options", RENDERERS.values(), ids=RENDERERS)
def test_an_environment_may_answer_the_model_until_a_limit(engine: ScriptedEngine, options: dict[str, Any]) -> None:
    def answer(prompt: str) -> str | None:
        return {0: "one", 1: "three"}.get(prompt.count("go on"))

    [outcome] = run(engine, answer, rows(GAME, size=20)[:1], GAME, **options)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.reward == len("three")
    assert not outcome.finished
    assert len(engine.calls) == 3
    check_one_segment(engine)


def test_episodes_run_in_a_worker_that_is_forked_after_the_import(engine: ScriptedEngine) -> None:
    ended: SimpleQueue[Any] = SimpleQueue()
    engine.answer = lambda call: words("4")
    row = {"task": {"idx": 3, "prompt": "3+1?", "answer": 4}}
    fork_server = ForkServer({SUMS: AgentSpec(SUMS, {}, 60.0)})
    worker = AgentWorker(fork_server, ModelService(engine.endpoint.url, "worker", engine.model), ended.put)
    for _ in range(4):
        worker.start(StartEpisode(*engine.open("worker"), row, 0))
    outcomes = [message.outcome for _ in range(4) for message in ended.get(timeout=60)]
    assert [outcome.reward for outcome in outcomes] == [1.5] * 4


def test_an_error_of_the_task_is_no_outcome(engine: ScriptedEngine) -> None:
    row = {"task": {"idx": 0, "prompt": "0+1?", "answer": -1}}
    [error] = run(engine, lambda prompt: "1", [row])
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
