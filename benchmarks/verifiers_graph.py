"""The trace graph that verifiers makes of the calls of an episode."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def branches_of(calls: Sequence[tuple[Any, Any, Any, Any]], tools: Sequence[Any]) -> tuple[Counter[Any], Counter[Any]]:
    """Return the tokens of each branch, and each sampled node as the tokens before it with those that it trains.

    A call is its messages, its reply, and the tokens of both.
    """
    from verifiers.v1.graph import leaves, prepare_turn
    from verifiers.v1.trace import Trace
    from verifiers.v1.types import Response, Tool, TurnTokens

    trace: Any = Trace.model_construct(nodes=[], calls=[], tools=[], mm_token_type_id_map={})
    functions = [Tool(**tool["function"]) for tool in tools]
    for messages, reply, prompt_ids, reply_ids in calls:
        turn = prepare_turn(trace, [_message(message) for message in messages], functions)
        # All new tokens of a prompt belong to its last message.
        tokens = TurnTokens(
            prompt_ids=list(prompt_ids),
            completion_ids=list(reply_ids),
            completion_logprobs=[0.0] * len(reply_ids),
            message_spans=[None] * (len(messages) - 1) + [(0, len(prompt_ids))],
        )
        turn.commit(Response(id="", created=0, model="", message=_message(reply), finish_reason="stop", tokens=tokens))
    branches, replies = Counter[Any](), {}
    for leaf in leaves(trace):
        path: list[int] = []
        node: int | None = leaf
        while node is not None:
            path.insert(0, node)
            node = trace.nodes[node].parent
        ids: list[int] = []
        for node in path:
            added, mask = trace.nodes[node].token_ids, trace.nodes[node].mask
            ids += added
            if any(mask):  # in the first branch alone
                start = len(ids) - sum(mask)
                replies[node] = tuple(ids[:start]), tuple(ids[start:])
        branches[tuple(ids)] += 1
    return branches, Counter(replies.values())


def _message(message: Mapping[str, Any]) -> Any:
    from verifiers.v1.types import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage

    role, content = message["role"], message.get("content")
    if role != "assistant":
        kinds = {"system": SystemMessage, "user": UserMessage, "tool": ToolMessage}
        fields = {"tool_call_id": message["tool_call_id"]} if role == "tool" else {}
        return kinds[role](content=content, **fields)
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return AssistantMessage(
        content=content, reasoning_content=message.get("reasoning_content"), tool_calls=calls or None
    )
