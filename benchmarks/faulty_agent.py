"""An agent that fails once, in the way that its row says."""

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.agents.base import Agent, Client, ModelService, Outcome

TOOL_S, DISCONNECT_S = 0.02, 0.01
CHAT, TOKENS = "/chat/completions", "/inference/v1/generate"


@dataclass
class FaultyAgent(Agent):
    """Calls as often as its row says, and fails once in the way that the row says."""

    folder: str

    async def open(self, service: ModelService) -> None:
        """Open connections."""
        import aiohttp

        self.http = aiohttp.ClientSession()

    async def run(self, client: Client, row: Any) -> Outcome:
        """Run one episode."""
        number, total = row["number"], 0
        messages: list[Any] = [{"role": "user", "content": f"begin {number}"}]
        ids = [7, number]
        for turn in range(row["turns"]):
            headers: dict[str, str] = {}
            body = {"messages": messages} if row["is_chat"] else {"token_ids": ids, "sampling_params": {}}
            if turn == row["fault_turn"]:
                with suppress(FileExistsError):
                    Path(self.folder, row["fault_id"]).touch(exist_ok=False)
                    await self.fail(client, row["fault"], body)
                    headers = {"x-stainless-retry-count": "1"}
            answer = await self.post(client, body, headers)
            if row["is_chat"]:
                message = answer["choices"][0]["message"]
                messages = [*messages, message, {"role": "user", "content": f"more {turn}"}]
                total += len(message["content"])
                client.call_rewards[answer["id"]] = turn
            else:
                ids = [*ids, *answer["choices"][0]["token_ids"], 7]
                client.call_rewards[answer["request_id"]] = turn
            await asyncio.sleep(TOOL_S * (number % 3))
        return Outcome(float(total + len(ids)))

    async def post(self, client: Client, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        """Call the model."""
        url = client.base_url + CHAT if "messages" in body else client.base_url.removesuffix("/v1") + TOKENS
        headers = {"Authorization": f"Bearer {client.api_key}", **headers}
        async with self.http.post(url, json={"model": client.model, **body}, headers=headers) as response:
            response.raise_for_status()
            return await response.json()

    async def fail(self, client: Client, fault: str, body: Mapping[str, Any]) -> None:
        """Let a fault happen."""
        if fault == "disconnect":
            with suppress(TimeoutError):
                await asyncio.wait_for(self.post(client, body, {}), DISCONNECT_S)
        elif fault == "raise":
            raise ValueError("the shop is closed")
        elif fault == "exit":
            os._exit(3)
        elif fault == "sleep":
            await asyncio.sleep(3600)
        elif fault == "block":
            time.sleep(3600)
