"""The demand of a role: what its engine, its model and its pins ask of the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from rlflow.errors import PlacementError
from rlflow.resources.layout import OFFLOAD_STAGES, Resources
from rlflow.resources.memory.state import MIXED_PRECISION, TrainingMemory
from rlflow.resources.models.architecture import Architecture, heads_divide
from rlflow.resources.models.lora import Lora

_OPEN = Resources()
RoleJob = Literal["train", "score", "serve"]
"""The work of a role on its GPUs: to train a model, to score with it, or to serve generation."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The demand of one role."""

    role: str
    engine: str
    parallel: frozenset[str]
    """The ways in which the engine can be parallel: tensor, pipeline, data, sequence, expert, replicate."""
    job: RoleJob
    architecture: Architecture | None
    """None for a model whose figures are not known."""
    dtype: str = "bfloat16"
    """The number type that the model computes in."""
    weight_bytes: float = 2
    """Bytes of a parameter, where the role is not trained."""
    training: TrainingMemory = MIXED_PRECISION
    """How the engine keeps the state of a model that it trains."""
    own_process: bool = False
    """Its engine runs in a process of its own wherever it is placed."""
    follows_lora: Lora | None = None
    """The adapters that it takes over from the role it follows."""
    pins: Resources
    """The values that the recipe pins."""

    def pinned(self, name: str) -> int | None:
        """Return a pinned degree or number of GPUs: 1 where the engine has no choice, None where it is open."""
        return self._pinned[name]

    @cached_property
    def _pinned(self) -> Mapping[str, int | None]:
        found: dict[str, int | None] = {}
        for name in ("gpus", *(f"{way}_parallel_size" for way in ("tensor", "pipeline", "data", "sequence", "expert"))):
            value = getattr(self.pins, name)
            has_choice = name == "gpus" or name.removesuffix("_parallel_size") in self.parallel
            found[name] = int(value) if value != "auto" else None if has_choice else 1
        if self.job == "serve" and found["tensor_parallel_size"] is None and (found["expert_parallel_size"] or 1) > 1:
            found["tensor_parallel_size"] = found["expert_parallel_size"]
        return found

    def shares_heads(self, size: int) -> bool:
        """Return whether ``size`` GPUs can share the heads of attention and of recurrent layers evenly."""
        model = self.architecture
        if model is None:
            return True
        if model.recurrent is not None and model.recurrent.value_width % size:
            return False
        return heads_divide(model.num_attention_heads, model.num_key_value_heads, size)

    def cuts_layers(self, size: int) -> bool:
        """Return whether ``size`` ranks of torch can divide the layers that this role trains or scores with."""
        model = self.architecture
        is_whole = model is None or (model.vision is None and model.cuts_evenly(size))
        return size == 1 or (self.training.lora is None and is_whole)

    @property
    def adapts_experts(self) -> bool:
        """Return whether experts have adapters, which every GPU needs whole."""
        return self.training.lora is not None and self.training.lora.experts

    def divides_experts(self, size: int) -> bool:
        """Return whether ``size`` GPUs of an engine can divide the experts: the width of each, or their number."""
        model, pinned = self.architecture, self.pinned("expert_parallel_size")
        if model is None or not model.num_experts or size == 1:
            return True
        divides_width = pinned in (None, 1) and model.expert_width % size == 0
        return divides_width or (pinned in (None, size) and model.num_experts % size == 0)

    def check(self, largest_host: int, *, on_gpus: bool = True) -> None:
        """Check the pins against the engine, the hosts and each other. Raises PlacementError."""
        self._check_applies()
        self._check_kernels(on_gpus)
        for way in ("tensor", "sequence"):
            self._check_group(way, largest_host)
        stages = self.pinned("pipeline_parallel_size") or 1
        layers = self.architecture.num_hidden_layers if self.architecture else stages
        if stages > layers:
            raise self._error("pipeline_parallel_size", f"{stages} stages for {layers} layers", fix=str(layers))
        tensor, sequence = (self.pinned(f"{way}_parallel_size") or 1 for way in ("tensor", "sequence"))
        if self.follows_lora is not None and stages > 1 and (size := tensor * sequence * stages) > largest_host:
            fact = f"the {size} GPUs of one engine with adapters do not fit on one host (hosts have {largest_host})"
            fits = max(1, largest_host // (tensor * sequence))
            raise self._error("pipeline_parallel_size", fact, fix=str(fits))
        needed = 0 if self.pins.offload == "auto" else OFFLOAD_STAGES[self.pins.offload]
        if self.pins.zero_stage != "auto" and self.pins.zero_stage < needed:
            fact = f"{self.pins.zero_stage} does not shard the state that offload={self.pins.offload} moves"
            raise self._error("zero_stage", fact, fix=str(needed))
        if self.pins.zero_stage == 0 and self.job == "train" and self.weight_bytes == 2:
            fact = "0 sums gradients in bfloat16, the type of the weights, which loses small gradients in large sums"
            raise self._error("zero_stage", fact, fix="1")
        self._check_gpus()

    def _error(self, field: str, fact: str, *, fix: str) -> PlacementError:
        return PlacementError(f"roles.{self.role}.{field}", fact, fix=f"roles.{self.role}.{field}={fix}")

    def _check_applies(self) -> None:
        """Check that the engine has every option that is pinned."""
        for way in ("tensor", "pipeline", "data", "sequence", "expert"):
            degree = getattr(self.pins, f"{way}_parallel_size")
            if degree not in ("auto", 1) and way not in self.parallel:
                fact = f"is {degree}, but engine '{self.engine}' cannot be {way}-parallel"
                raise self._error(f"{way}_parallel_size", fact, fix="1")
        num_experts = self.architecture.num_experts if self.architecture else None
        groups = self.pinned("expert_parallel_size") or 1
        if (num_experts or 1) % groups:
            fact = f"{groups} GPUs cannot divide the experts of a model that has {num_experts or 'no experts'}"
            raise self._error("expert_parallel_size", fact, fix="1")
        if self.adapts_experts and groups > 1:
            fact = f"{groups} GPUs cannot divide experts that have adapters"
            raise self._error("expert_parallel_size", fact, fix="1")
        sees_images = self.architecture is not None and self.architecture.vision is not None
        tensor = self.pinned("tensor_parallel_size") or 1
        if "replicate" in self.parallel and not self.cuts_layers(tensor):
            fact = f"{tensor} GPUs cannot divide the layers of this model evenly"
            if self.training.lora is not None:
                fact = f"{tensor} GPUs cannot divide layers that have adapters"
            elif sees_images:
                fact = f"{tensor} GPUs cannot divide a model that sees images"
            raise self._error("tensor_parallel_size", fact, fix="1")
        if "replicate" in self.parallel and num_experts and groups > 1 and groups % tensor:
            fact = f"{groups} GPUs do not consist of tensor-parallel groups of {tensor}, and experts are not cut"
            raise self._error("expert_parallel_size", fact, fix=str(tensor))
        serves, trains = self.job == "serve", self.job == "train"
        if serves and groups not in (1, tensor):
            fact = (
                f"is {groups}, but an engine divides experts among its {tensor} tensor-parallel GPUs, and shares none"
            )
            raise self._error("expert_parallel_size", fact, fix=str(tensor))
        if serves and not self.divides_experts(tensor):
            assert self.architecture is not None
            fact = f"{tensor} GPUs cannot divide experts of width {self.architecture.expert_width}"
            if groups == 1 and self.pinned("expert_parallel_size") is None:
                fact += f", nor {num_experts} experts"
            raise self._error("tensor_parallel_size", fact, fix=str(self._largest_group(tensor)))
        sharded = not serves and "data" in self.parallel
        for field, has in (
            ("zero_stage", sharded and "replicate" not in self.parallel),
            ("offload", sharded and "replicate" not in self.parallel),
            ("num_replicas", sharded and "replicate" in self.parallel),
            ("micro_batch_patches", not serves and sees_images),
            ("gradient_checkpointing", trains),
            ("kept_layers", trains),
            ("gpu_memory_utilization", serves and "tensor" in self.parallel),
            ("eager", serves and "tensor" in self.parallel),
            ("attention", not serves or "tensor" not in self.parallel),
            ("deterministic", trains),
            ("timeout_minutes", not serves),
        ):
            if not has and getattr(self.pins, field) != (default := getattr(_OPEN, field)):
                fix = str(default).lower()
                raise self._error(field, f"does not apply to this role with engine '{self.engine}'", fix=fix)

    def _check_kernels(self, on_gpus: bool) -> None:
        if self.pins.attention == "flash_attention_2" and not on_gpus:
            raise self._error(
                "attention", "'flash_attention_2' runs on GPUs only, and these hosts have CPUs", fix="auto"
            )
        if self.pins.attention == "flash_attention_2" and self.weight_bytes != 2:
            raise self._error("attention", "'flash_attention_2' has no kernel for a float32 model", fix="auto")

        if self.pins.eager is False and not on_gpus:
            raise self._error("eager", "false asks for CUDA graphs, and these hosts have CPUs", fix="auto")

    def _check_group(self, way: str, largest_host: int) -> None:
        size = self.pinned(f"{way}_parallel_size") or 1
        if size > largest_host:
            raise PlacementError(
                f"roles.{self.role}",
                f"{size} GPUs of one {way}-parallel group do not fit on one host (hosts have {largest_host})",
                fix=f"{way}_parallel_size {self._largest_group(largest_host)}",
            )
        if not self.shares_heads(size):
            model = self.architecture
            assert model is not None
            fact = f"{size} GPUs cannot share the model's {model.num_attention_heads} attention heads evenly"
            fact += f" ({model.num_key_value_heads} key-value heads)"
            raise self._error(f"{way}_parallel_size", fact, fix=str(self._largest_group(size)))

    def _largest_group(self, most: int) -> int:
        experts = self.divides_experts if self.job == "serve" else lambda size: True
        return next(size for size in range(most, 0, -1) if self.shares_heads(size) and experts(size))

    def _check_gpus(self) -> None:
        gpus = self.pinned("gpus")
        if gpus is None or "data" not in self.parallel:
            return
        degrees = {
            name: value
            for name in ("tensor", "pipeline", "sequence", "data")
            if (value := self.pinned(f"{name}_parallel_size")) not in (None, 1)
        }
        group = prod(degrees.values())
        every = all(self.pinned(f"{name}_parallel_size") for name in ("tensor", "pipeline", "sequence", "data"))
        if gpus % group or (every and group != gpus):
            named = " and ".join(f"{name}_parallel_size {value}" for name, value in degrees.items()) or "degrees of 1"
            fits = group if every else max(1, gpus // group) * group
            raise self._error("gpus", f"{gpus} GPUs cannot all be used with {named}", fix=str(fits))
