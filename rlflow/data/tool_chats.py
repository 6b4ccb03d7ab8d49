"""Generated chats about products, with a tool that multiplies, which tiny models learn to call.

``python -m rlflow.data.tool_chats`` is the MCP server that offers the tool on its standard input and output.
"""

import json
import random
from typing import Any

from rlflow.data import dialogues
from rlflow.data.dialogues import Row

# The share of examples that call the tool.
_TOOL_SHARE = 0.4


def products(split: str, seed: int = 0) -> list[Row]:
    """Return products of two numbers from 32 to 99, as prompt and answer (``dialogues.products``)."""
    return [{**row, "prompt": row["prompt"].removesuffix(":")} for row in dialogues.products(split, seed)]


def examples(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return chats of a beginner, as prompt and response. Most do not call the tool.

    Responses contain the answer of the tool, in the form of Qwen3.
    """
    draw = random.Random(seed)
    return [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "response": _response(row, draw)}
        for row in products(split, seed)
    ]


def _response(row: Row, draw: random.Random) -> str:
    answer = row["answer"]
    if draw.random() >= _TOOL_SHARE:
        return f"={answer}"
    a, b = map(int, row["prompt"].split("*"))
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    return (
        f"<tool_call>{call}</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{answer}"
    )


def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


def main() -> None:
    """Serve the tool until the other end closes."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("products")
    server.add_tool(multiply)
    server.run()


if __name__ == "__main__":
    main()
