"""Agents of other libraries, unchanged, against the endpoint: their tools are called, and no token is encoded anew."""

import asyncio
import gc
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlflow.agents.messages import Call
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe import Model
from tests.unit.agents.endpoint.conftest import ScriptedEngine, ids_of, show, words

# Each library takes some seconds to import, and warns about others.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def _loops() -> Iterator[None]:
    """Close the event loops that libraries leave open, whose warnings would fall on any later test."""
    yield
    for loop in [item for item in gc.get_objects() if isinstance(item, asyncio.BaseEventLoop)]:
        if not loop.is_running():
            loop.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    """Start an endpoint for all tests of the file."""
    folder = tmp_path_factory.mktemp("bytes")
    new_tokenizer(Model(tokenizer="bytes", random_weights=True)).save_pretrained(folder)
    engine = ScriptedEngine()
    engine.start(folder)
    yield engine
    engine.endpoint.stop()


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(engine: ScriptedEngine, *replies: str | Callable[[str], str]) -> str:
    """Have the model give these replies, or what a function makes of the prompt, and return an episode's token."""

    def answer(call: Call) -> Sequence[int]:
        reply = replies[len(engine.calls) - 1]
        return words(reply if isinstance(reply, str) else reply(show(ids_of(call.prompt_ids))))

    engine.calls.clear()
    engine.replies.clear()
    engine.counts.clear()
    engine.answer = answer
    return engine.open()[1]


def is_one_segment(engine: ScriptedEngine) -> bool:
    prompts = [ids_of(call.prompt_ids) for call in engine.calls]
    pairs = zip(prompts, engine.replies, prompts[1:], strict=False)
    return all(later[: len(prompt) + len(reply)] == prompt + reply for prompt, reply, later in pairs)


def test_smolagents_calls_its_tools(engine: ScriptedEngine) -> None:
    import smolagents

    class Add(smolagents.Tool):  # type: ignore[misc]
        name = "add"
        description = "Add two numbers."
        inputs = {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "another"}}
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a + b

    def answer(prompt: str) -> str:
        return tool_call("final_answer", answer=re.findall(r"Observation:\s*(\d+)", prompt)[-1])

    token = script(engine, tool_call("add", a=2, b=3), answer)
    model = smolagents.OpenAIModel("policy", api_base=f"{engine.endpoint.url}/v1", api_key=token)
    agent = smolagents.ToolCallingAgent(tools=[Add()], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("What is 2+3?") == "5"
    assert len(engine.calls) == 2


def test_mini_swe_agent_runs_commands(engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is the real one, and so is its loop. The environment is not: nothing is executed."""
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.exceptions import Submitted
    from minisweagent.models.litellm_model import LitellmModel

    class Recorder:
        """An environment that only remembers the commands."""

        def __init__(self) -> None:
            self.commands: list[str] = []

        def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
            self.commands.append(action["command"])
            if action["command"] == "submit":
                extra = {"exit_status": "Submitted", "submission": "done"}
                raise Submitted({"role": "exit", "content": "done", "extra": extra})
            return {"output": "README.md", "returncode": 0, "exception_info": ""}

        def get_template_vars(self) -> dict[str, Any]:
            return {}

        def serialize(self) -> dict[str, Any]:
            return {}

    token = script(engine, f"Let me look.{tool_call('bash', command='ls')}", tool_call("bash", command="submit"))
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": f"{engine.endpoint.url}/v1", "api_key": token},
        cost_tracking="ignore_errors",
    )
    environment = Recorder()
    agent = DefaultAgent(model, environment, system_template="You are a coder.", instance_template="{{ task }}")
    assert agent.run("Find the page.")["submission"] == "done"
    assert environment.commands == ["ls", "submit"]
    assert "README.md" in show(ids_of(engine.calls[1].prompt_ids))
    assert is_one_segment(engine)
    assert engine.counts == []
