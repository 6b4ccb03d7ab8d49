"""All that rlflow uses of the library verifiers. No other file imports it."""

import os
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

from rlflow.agents.base import Message, ModelService
from rlflow.errors import RecipeError, first_line

CHAT = "rlflow_verifiers_chat"
"""The module that verifiers finds the harness of ``chat_module`` in: it imports plugins by name, from the top level."""

# Processes that verifiers starts do not inherit variables with API_KEY in their names.
_KEY_VARIABLE = "RLFLOW_API_KEY"

Chat = Callable[[list[Message], Any, str, str, Mapping[str, str]], Awaitable[None]]
"""Holds a chat, given its first messages, the trace, the address and the key of verifiers' endpoint, and the addresses
of the task's MCP servers."""


def prepare() -> None:
    """Import the library."""
    import verifiers.v1.utils.loaders  # noqa: F401


def load_environment(name: str, taskset: Mapping[str, Any], harness: str) -> Any:
    """Return the environment of a taskset, whose only agent gets the harness. Raises RecipeError."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    config = {"taskset": {**taskset, "id": name}}
    roles = list(agent_config_fields(loaders.resolve_env_config(config)))
    if len(roles) != 1:
        fact = f"expected a taskset for one agent, got '{name}' for {', '.join(roles)}"
        raise RecipeError("environment", fact, fix="choose another taskset")
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    return loaders.load_environment(loaders.resolve_env_config({**config, roles[0]: agent}))


def load_taskset(name: str, config: Mapping[str, Any]) -> Any:
    """Return the taskset with its configuration."""
    from verifiers.v1.utils import loaders

    return loaders.load_taskset(loaders.taskset_config_type(name).model_validate({**config, "id": name}))


def model_context(service: ModelService, renderer: Mapping[str, Any]) -> Any:
    """Return the model as verifiers reaches it: as chats, or with a renderer as tokens, by its client for training."""
    import verifiers.v1 as vf

    os.environ[_KEY_VARIABLE] = service.key
    config: dict[str, Any] = {"base_url": f"{service.url}/v1", "api_key_var": _KEY_VARIABLE}
    sampling: dict[str, Any] = {"max_tokens": service.model.turn_tokens}
    if not renderer:
        client = vf.EvalClientConfig.model_validate(config)
    else:
        config |= {"renderer": dict(renderer), "renderer_model_name": service.model.tokenizer}
        client = vf.TrainClientConfig.model_validate(config)
        if service.model.template_options:
            sampling["chat_template_kwargs"] = dict(service.model.template_options)
    return vf.ModelContext(model=service.model.name, client=client, sampling=vf.SamplingConfig.model_validate(sampling))


def check_harness(name: str) -> None:
    """Raise RecipeError unless there is a harness of this name that executes no code."""
    from verifiers.v1.utils.loaders import harness_class

    try:
        harness = harness_class(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError("options.harness", f"no harness '{name}' ({first_line(error)})", fix="use chat") from None
    if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
        fact = f"with the harness '{name}', the model could execute code on this host"
        raise RecipeError("options.harness", fact, fix="use chat")


def chat_module(chat: Chat) -> ModuleType:
    """Return a module with a harness that calls ``chat`` in this process."""
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """A harness that begins again with all messages so far when the environment answers."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: list[Message] = [{"role": "system", "content": system}] if system else []
            is_text = isinstance(prompt, str)
            messages += [{"role": "user", "content": prompt}] if is_text else map(message_to_wire, prompt)
            await chat(messages, trace, endpoint, secret, mcp_urls)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(CHAT)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module
