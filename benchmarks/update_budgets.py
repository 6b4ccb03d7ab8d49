"""The cost of an update by counting, on any machine: bytes for each logit, waits of the host, gathers, graphs.

``python -m benchmarks.update_budgets [--json FILE]``

No time is measured. Bytes of the output layer are those of torch's operators on tensors without data, and of compiled
functions those that torch's compiler counts for its kernels. Passes and graphs are those of a tiny model, whose layers
are compiled as on a GPU, with a kernel for CPUs behind torch's attention over segments. Differences are to the model of
transformers, which reads one row after another.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from benchmarks.reporting import Goal, finish
from benchmarks.varlen_on_cpu import register_cpu_kernel
from rlflow.batch import Minibatch, Packed
from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm import attention, output_layer
from rlflow.engines.causal_lm.compilation import compile_layers
from rlflow.engines.causal_lm.token_outputs import token_scores
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.policy_loss import LikelihoodLoss, PolicyLoss, clipped_surrogate
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture

GOALS = {
    "bytes_per_logit": 20.0,
    "syncs_per_micro_batch": 1.0,
    "query_gathers": 0.0,
    "graphs": 1.0,
    "recompilations": 0.0,
    "difference_max": 1e-5,
    "old_logprobs_difference": 1e-6,
}
"""The most of each figure. What a sequence costs in a decoding step is a figure of benchmarks.decode_cost."""

# Operators after which the host waits for a GPU: reading a number, and results of unknown size.
_WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "unique_dim")
_NEW_SHAPES = 10


def bytes_per_logit(tokens: int = 8192, width: int = 896, vocabulary: int = 151_936, *, trains: bool = True) -> float:
    """Return the bytes that the output layer reads and writes for each logit in bfloat16.

    Where it ``trains``, these are those of the forward and the backward pass.
    """
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    compiled = mock.patch.multiple(output_layer, _fused=_counted, can_compile=lambda device: True)
    with compiled, _OperatorBytes() as counter:
        with torch.set_grad_enabled(trains):
            scores = output_layer.score_targets(hidden, weight, None, targets, 1.0, "reported" if trains else "unused")
        if trains:
            torch.autograd.grad(scores[:, 0].sum(), [hidden, weight])
    return float(counter.total / (tokens * vocabulary))


class _OperatorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of the inputs and outputs of all operators but views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        is_view = any(returned.alias_info and not returned.alias_info.is_write for returned in operator._schema.returns)
        if not is_view and "empty" not in str(operator):
            tensors = [tensor for tensor in (*args, *(kwargs or {}).values()) if isinstance(tensor, Tensor)]
            written = result if isinstance(result, tuple | list) else [result]
            tensors += [tensor for tensor in written if isinstance(tensor, Tensor)]
            self.total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def _counted(function: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """Return ``function`` as one operator, whose bytes are those of the kernels that torch's compiler makes of it."""

    def call(*inputs: Any) -> Tensor:
        counter = next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _OperatorBytes))
        before = counter.total
        output = function(*inputs)
        shapes = tuple((*x.shape, x.dtype) if isinstance(x, Tensor) else x for x in inputs)
        counter.total = before + _compiled_bytes(function, shapes)
        return output

    return call


@cache
def _compiled_bytes(function: Callable[..., Tensor], shapes: tuple[Any, ...]) -> float:
    """Return the bytes that the compiled function moves, counted for a tile of 64 tokens and scaled to all tokens.

    ``shapes`` are its inputs; of each tensor the shape, and then the dtype.
    """
    with warnings.catch_warnings():
        # torch's compiler imports names that torch itself has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._inductor.compile_fx import fake_tensor_prop
        from torch._inductor.debug import DebugContext
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

    tokens = next(shape[0] for shape in shapes if isinstance(shape, tuple))
    few = min(tokens, 64)
    counted = [0.0]

    def count(module: Any, examples: Any) -> Any:
        graph = GraphLowering(module)
        fake = fake_tensor_prop(module, examples)
        with V.set_fake_mode(fake), V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*examples)
            graph._update_scheduler()
            counted[0] += graph.count_bytes()[0]
        # The compiled function is not needed.
        return make_boxed_func(module.forward)

    inputs = [torch.zeros(few, *x[1:-1], dtype=x[-1]) if isinstance(x, tuple) else x for x in shapes]
    with _disable_current_modes(), torch.no_grad():
        backend = aot_autograd(fw_compiler=count, decompositions=select_decomp_table())
        torch._dynamo.reset()
        torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return float(counted[0] * tokens / few)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that ran, with the shapes of their first tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        self.calls.append((operator._schema.name.removeprefix("aten::"), shape))
        return operator(*args, **(kwargs or {}))


def passes() -> dict[str, float]:
    """Count the waits of an update for each micro-batch, and the gathers of queries and outputs of attention."""
    with varlen_kernel():
        waits = []
        for micro_batch_tokens in (40, 400):
            engine = _engine(micro_batch_tokens)
            batch = _minibatch(0, prompts=8)
            with _Operators() as operators:
                engine.update(batch, _policy_loss())
            pieces = sum(name == "embedding" for name, _ in operators.calls)
            waits.append((pieces, sum(name in _WAITS for name, _ in operators.calls)))
            heads = engine._model.config.num_attention_heads
            moved = Counter(
                name for name, shape in operators.calls if len(shape) == 3 and shape[1] == heads and "index" in name
            )
    (many, often), (few, seldom) = waits
    return {"syncs_per_micro_batch": (often - seldom) / (many - few), "query_gathers": float(sum(moved.values()))}


def graphs() -> dict[str, float]:
    """Count the graphs of all layers in updates, those that streams of new lengths add, and the largest difference."""
    with varlen_kernel():
        compiled, loss = _engine(10**6), LikelihoodLoss()
        torch._dynamo.reset()
        counters.clear()
        compile_layers(compiled._model, backend="aot_eager")
        compiled.update(_minibatch(0), loss)
        first = counters["stats"]["unique_graphs"]
        for number in range(1, _NEW_SHAPES + 1):
            compiled.update(_minibatch(number), loss)
        added = counters["stats"]["unique_graphs"] - first + sum(counters["graph_break"].values())
        difference = max(_difference(compiled, _minibatch(number)) for number in range(3))
    return {"graphs": float(first), "recompilations": float(added), "difference_max": difference}


def old_logprobs_difference() -> float:
    """Return the largest difference of gradients with old logprobs of a separate pass to those without.

    It is relative to the largest gradient.
    """
    gradients = []
    for scores_first in (True, False):
        engine, batch = _engine(40), _minibatch(0, prompts=8)
        columns = {"advantages": batch.columns["advantages"]}
        if scores_first:
            columns["old_logprobs"] = engine.logprobs(batch, 1.0).values
        engine._compute_gradients(replace(batch, columns=columns), _policy_loss())
        weights = engine._trained_weights().values()
        gradients.append(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))
    separate, without = gradients
    return float((separate - without).abs().max() / separate.abs().max())


def _difference(engine: TorchEngine, batch: Minibatch) -> float:
    """Return the largest difference of logprobs and of gradients to transformers reading one row after another.

    Gradients' are relative to the largest of all: those of the biases of keys are nothing but rounding.
    """
    model: Any = engine._model
    packed = token_scores(model, batch, 1.0)[:, 0]
    plain = torch.cat([_plain_logprobs(model, batch, row) for row in range(len(batch))])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    direction = torch.randn(len(plain), generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.autograd.grad((scores * direction).sum(), weights) for scores in (packed, plain))
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    gradients = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest
    return max(float((packed - plain).detach().abs().max()), gradients)


def _plain_logprobs(model: Any, batch: Minibatch, row: int) -> Tensor:
    prompt, response = batch.prompt_ids[row], batch.response_ids[row]
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")
    layers = [layer for layer in model.modules() if getattr(layer, "_compiled_call_impl", None) is not None]
    compiled = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    finally:
        model.set_attn_implementation(chosen)
        for layer, call in zip(layers, compiled, strict=True):
            layer._compiled_call_impl = call
    logprobs: Tensor = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return logprobs


@contextmanager
def varlen_kernel() -> Iterator[None]:
    """Make attention go the way that it goes on a GPU."""
    register_cpu_kernel()
    with mock.patch.object(attention, "has_varlen_kernel", return_value=True):
        yield


def _engine(micro_batch_tokens: int) -> TorchEngine:
    architecture = Architecture(
        model_type="qwen2",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=20,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    spec = EngineSpec(
        role="actor",
        model_name="policy",
        model=Model(architecture=architecture, random_weights=True, characters="0123456789+=", dtype="float32"),
        capabilities=frozenset({"Trains", "Scores"}),
        device="cpu",
        seed=0,
        steps=100,
        optimizer=Optimizer(learning_rate=1e-3),
        layout=Layout(micro_batch_tokens=micro_batch_tokens),
    )
    return TorchEngine(spec)


def _minibatch(seed: int, prompts: int = 3) -> Minibatch:
    """Return groups of four responses to each of some prompts, all of different lengths."""
    draw = np.random.default_rng(seed)
    rows = [(prompt, draw.integers(1, 12, draw.integers(2, 15))) for prompt in range(prompts) for _ in range(4)]
    ids = [draw.integers(1, 12, draw.integers(2, 15)) for _ in range(prompts)]
    response_ids = Packed.from_rows([response for _, response in rows], np.int32)
    values = draw.normal(size=len(response_ids.values)).astype(np.float32)
    return Minibatch(
        keys=np.array([[0, prompt, number % 4] for number, (prompt, _) in enumerate(rows)], np.int64),
        prompt_ids=Packed.from_rows([ids[prompt] for prompt, _ in rows], np.int32),
        response_ids=response_ids,
        step=0,
        columns={"advantages": response_ids.like(values), "old_logprobs": response_ids.like(-np.abs(values))},
        weights=response_ids.like(np.full(len(values), 1 / len(values), np.float32)),
    )


def _policy_loss() -> PolicyLoss:
    def surrogate(logprobs: Tensor, columns: Any) -> Any:
        return clipped_surrogate((logprobs - columns["old_logprobs"]).exp(), columns["advantages"], 0.2, None)

    return PolicyLoss(surrogate=surrogate, temperature=1.0)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    figures = {"bytes_per_logit": bytes_per_logit(), **passes(), **graphs()}
    figures["old_logprobs_difference"] = old_logprobs_difference()
    goals = {name: Goal(f"at most {most:g}", figures[name] <= most) for name, most in GOALS.items()}
    return finish("update_budgets", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
