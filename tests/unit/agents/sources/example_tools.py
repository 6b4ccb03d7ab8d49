"""Tools for tests. As a program, the file is an MCP server that offers some of them."""

import os
import time
from typing import Annotated

from pydantic import Field

LIMIT = 5


def add(a: int, b: Annotated[int, Field(description="the second number")] = 1) -> int:
    """Add two numbers."""
    return a + b


async def weather(city: str) -> dict[str, str]:
    """Tell the weather."""
    if city == "Atlantis":
        raise ValueError("it is under water")
    return {"sky": "blue", "city": city}


def hang() -> None:
    """Sleep for longer than the limit."""
    time.sleep(5)


def star(*numbers: int) -> int:
    return sum(numbers)


if __name__ == "__main__":
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("tools")
    server.tool()(add)

    @server.tool()
    def variable(name: str) -> str:
        """Return an environment variable."""
        return os.environ[name]

    @server.tool()
    def end() -> str:
        """End the server."""
        os._exit(1)

    server.run()
