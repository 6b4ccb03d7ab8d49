"""The ranks: processes that train one engine after another, and what they report."""

import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from benchmarks.parallel.cases import Loss
from rlflow.batch import Minibatch
from rlflow.engines import fsdp
from rlflow.engines.base import EngineSpec
from rlflow.engines.buckets import join_parts

TOLERANCES = {"losses": 1e-6, "norms": 1e-5, "gradients": 1e-6, "weights": 1e-5}
"""The largest differences that are exact; that of a norm is a part of it."""
# An engine may halve sums, leave the gradients of other ranks out of the norm, or leave other ranks' heads out of the
# gradients of the norms of queries and keys. Degrees with which it shows: data, sequence, tensor, expert.
MISTAKES = {(2, 1, 1, 2): ("factor", "norm"), (2, 1, 2, 1): ("heads",)}


@dataclass(frozen=True, eq=False)
class Result:
    """Losses, norms, gradients and weights of three steps."""

    losses: Sequence[float]
    norms: Sequence[float]
    gradients: Mapping[str, Tensor]
    """The gradients of the first step."""
    weights: Mapping[str, Tensor]
    wrongly_sent: Sequence[str] = ()
    """Weights that left the engine before the first step with other values than their file has, in bfloat16."""

    def differences(self, expected: "Result", ranges: "Ranges") -> Mapping[str, float]:
        """Return the largest differences to one rank that are not exact; those of weights to its ``ranges``."""
        assert (self.gradients.keys(), self.weights.keys()) == (expected.gradients.keys(), ranges.keys())
        losses = max(abs(one - other) for one, other in zip(self.losses, expected.losses, strict=True))
        norms = max(abs(one / other - 1) for one, other in zip(self.norms, expected.norms, strict=True))
        gradients = max(float((self.gradients[name] - expected.gradients[name]).abs().max()) for name in self.gradients)
        weights = max(
            float((weight - weight.clamp(*ranges[name])).abs().max()) for name, weight in self.weights.items()
        )
        sizes = {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}
        return {name: size for name, size in sizes.items() if not size <= TOLERANCES[name]}


Ranges = Mapping[str, tuple[Tensor, Tensor]]
"""The least and the largest values of each weight, by name, that one rank computes with several orders of sums."""


def weight_ranges(results: Sequence[Result]) -> Ranges:
    """Return the ranges of the weights of several runs of one rank."""
    stacks = {name: torch.stack([result.weights[name] for result in results]) for name in results[0].weights}
    return {name: (stack.amin(0), stack.amax(0)) for name, stack in stacks.items()}


def train(engine: Any, parts: Sequence[Minibatch], mistake: str = "") -> Result:
    """Train three steps on this rank's rows, with a mistake on demand."""
    gradients: dict[str, Tensor] = {}
    step = engine._step

    def record(totals: Any) -> Any:
        for name, weight in {} if gradients else engine._trained_weights().items():
            if weight.grad is not None:
                gradients[name] = _full(weight.grad)
        return step(totals)

    if mistake == "factor":
        for module in engine._model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
    if mistake == "norm":
        engine._sum_over_shards = lambda value: value
    if mistake == "heads":
        for name, module in engine._model.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                del module.forward
    with mock.patch.object(engine, "_step", record):
        metrics = [engine.update(part, Loss()).values for part in parts]
    weights = {name: value.detach().clone() for name, value in engine.weights()}
    return Result([step["loss"] for step in metrics], [step["grad_norm"] for step in metrics], gradients, weights)


def _full(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.detach().clone()


def train_rank(spec: EngineSpec, parts: Sequence[Minibatch], mistake: str) -> Result | None:
    engine = fsdp.FsdpEngine(spec)
    wrong = find_wrongly_sent(engine, spec)
    result = replace(train(engine, parts, mistake), wrongly_sent=wrong)
    return result if spec.rank == 0 else None


def find_wrongly_sent(engine: Any, spec: EngineSpec) -> list[str]:
    """Return the weights that a sync in bfloat16, with most weights in slices, gives other values than the file has."""
    with mock.patch.object(fsdp, "LARGEST_BYTES", 2**12), mock.patch.object(engine, "_dtype", torch.bfloat16):
        sent = revert_weight_conversion(engine._model, dict(join_parts(engine.weights())))
    file = load_file(f"{spec.model.path}/model.safetensors")
    return [name for name, values in file.items() if not torch.equal(values.bfloat16(), sent[name])]


class _Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.name().split("::")[1].strip("_").split("_")[0]] += 1
        return function(*args, **(kwargs or {}))


def cost(spec: EngineSpec, batch: Minibatch, name: str) -> tuple[float, Mapping[str, int]]:
    """Return the least CPU seconds of a step, and its messages."""
    engine: Any
    if name == "fsdp":
        engine = fsdp.FsdpEngine(spec)
    else:
        from rlflow.engines import deepspeed
        from rlflow.engines.sharded.settings import deepspeed_config

        def config(spec: EngineSpec, *, trains: bool) -> dict[str, Any]:
            usual = deepspeed_config(spec, trains=trains)
            # By itself DeepSpeed keeps all weights of so small a model gathered.
            small = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 10_000}
            small |= {"stage3_prefetch_bucket_size": 10_000, "stage3_max_reuse_distance": 0}
            return usual | {"zero_optimization": usual["zero_optimization"] | small}

        vars(deepspeed)["deepspeed_config"] = config
        engine = deepspeed.DeepSpeedEngine(spec)
    seconds = []
    for _ in range(20):
        before = time.process_time()
        engine.update(batch, Loss())
        seconds.append(time.process_time() - before)
    messages = _Messages()
    with messages:
        engine.update(batch, Loss())
    return min(seconds), dict(messages.counts)


class Ranks:
    """Processes that are the ranks of one role after another."""

    def __init__(self, count: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        context = multiprocessing.get_context("fork")
        ends = [context.Pipe() for _ in range(count)]
        self._pipes = [end for end, _ in ends]
        self._processes = [context.Process(target=_serve, args=(end,), daemon=True) for _, end in ends]
        for process in self._processes:
            process.start()

    def call(self, function: Any, spec: EngineSpec, shares: Sequence[Any], *arguments: Any) -> list[Any]:
        """Return what a function gives on each rank for its share."""
        for rank, (pipe, share) in enumerate(zip(self._pipes, shares, strict=True)):
            of_rank = replace(spec, rank=rank, world_size=len(self._pipes), address=self._address)
            pipe.send((function, (of_rank, share, *arguments)))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(pipe: Any) -> None:
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send(function(*arguments))
        except Exception as error:  # whatever it is, it is raised where the call was made
            pipe.send(error)


@contextmanager
def running() -> Iterator[Mapping[int, Ranks]]:
    ranks = {count: Ranks(count) for count in (2, 4)}
    try:
        yield ranks
    finally:
        for group in ranks.values():
            group.close()
