"""Programs of the user, each of which runs one episode: ``environment: command``."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rlflow.agents.base import Agent, Client, Outcome
from rlflow.errors import RecipeError
from rlflow.rewards.base import Row
from rlflow.schema import Text, parse

# The only variables that a program inherits: keys of the user stay here.
_INHERITED = ("PATH", "HOME", "LANG", "PYTHONPATH")
# The characters of a failed program's words that are reported.
_LONGEST_REASON = 200


@dataclass
class CommandAgent(Agent):
    """A program that reads the row as JSON from its standard input, and calls the model with any library.

    It finds the model in the variables of OpenAI's and Anthropic's libraries, and its seed in ``RLFLOW_SEED``. The last
    line of its output is JSON: ``{"reward": 0.5}``, with ``finished`` and ``metrics`` if it likes.
    """

    # Starting Python with a library of agents takes 2.3 s, here for eight calls.
    call_cpu_s: ClassVar[float] = 0.3

    command: tuple[Text, ...]
    """The program and its arguments. No shell reads them. It runs on this host, with the rights of the user."""

    async def run(self, client: Client, row: Row) -> Outcome:
        """Run the program, and end it and its children if the episode is cancelled."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=pipe, stdout=pipe, stderr=pipe, env=_variables(client), process_group=0
        )
        try:
            output, errors = await process.communicate(json.dumps(row, default=str).encode())
        finally:
            # Children that it has left behind end too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise RuntimeError(f"'{self.command[0]}' exited with {process.returncode}: {_last_line(errors)}")
        return _outcome(_last_line(output))


def _variables(client: Client) -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "OPENAI_MODEL": client.model,
        "ANTHROPIC_BASE_URL": client.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": client.api_key,
        "ANTHROPIC_MODEL": client.model,
        "RLFLOW_SEED": str(client.seed),
    }


def _last_line(output: bytes) -> str:
    return output.decode(errors="replace").rstrip().rpartition("\n")[2]


def _outcome(line: str) -> Outcome:
    try:
        result = json.loads(line)
        return Outcome(float(result["reward"]), bool(result.get("finished", True)), result.get("metrics", {}))
    except (ValueError, TypeError, KeyError):
        shown = line[:_LONGEST_REASON]
        raise ValueError(f"the last line of its output is no JSON with a reward: {shown!r}") from None


def load(target: str, options: Mapping[str, Any]) -> CommandAgent:
    """Create the agent. Raises RecipeError."""
    agent = parse(CommandAgent, options, "options")
    if not agent.command:
        raise RecipeError("options.command", "is empty", fix="name a program")
    return agent
