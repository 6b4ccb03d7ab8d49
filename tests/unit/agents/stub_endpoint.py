"""An endpoint whose model is a function of the prompt's text, for protocols that other libraries speak."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rlflow.agents.base import ModelService, ModelSpec
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe.recipe import Model

KEY = "worker-key"


@dataclass
class StubEndpoint:
    """Answers ``/inference/v1/generate`` as the endpoint does; None refuses a call because of a limit."""

    folder: Path
    answer: Callable[[str], str | None]
    calls: list[tuple[str, str]] = field(default_factory=list)
    """The name of the episode and the prompt of each call."""

    async def start(self) -> ModelService:
        """Listen at a free port."""
        self.tokenizer = new_tokenizer(Model(random_weights=True, tokenizer="bytes"))
        self.tokenizer.save_pretrained(self.folder)
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/inference/v1/generate", self.generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port = self.runner.addresses[0][1]
        return ModelService(f"http://127.0.0.1:{port}", KEY, ModelSpec(str(self.folder), "policy", 4096, 64))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": 4096}]})

    async def generate(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized
        body: dict[str, Any] = await request.json()
        assert body["sampling_params"]["max_tokens"] == 64
        text = self.tokenizer.decode(body["token_ids"])
        self.calls.append((request.headers["X-Session-ID"], text))
        answer = self.answer(text)
        if answer is None:
            return web.json_response({"error": {"message": "max_calls"}}, status=400)
        ids = self.tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        content = [{"token": f"token_id:{token}", "token_id": token, "logprob": -0.5} for token in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r1", "choices": [choice]})
