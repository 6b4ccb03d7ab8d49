"""What one role asks for."""

from dataclasses import dataclass
from math import gcd

from rlflow.errors import PlacementError
from rlflow.resources.layout import Resources
from rlflow.resources.memory.state import DEEPSPEED, Training
from rlflow.resources.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one role asks for."""

    role: str
    engine: str
    parallel: frozenset[str]
    """The ways in which the engine can be spread: tensor, pipeline, data, sequence."""
    trains: bool
    generates: bool
    architecture: Architecture | None
    """None for a model whose figures are not known."""
    weight_bytes: float = 2
    """A parameter, where the role does not train."""
    training: Training = DEEPSPEED
    """Where it does."""
    wants: Resources

    def pinned(self, name: str) -> int | None:
        """A degree, or a number of GPUs, that the recipe gives; 1 where the engine has no other."""
        way = name.partition("_parallel_size")[0]
        value = getattr(self.wants, name)
        if value == "auto":
            return 1 if name != "gpus" and way not in self.parallel else None
        return int(value)

    def check(self, largest_host: int) -> None:
        """Raises PlacementError for degrees that the engine or the hosts cannot have, or that contradict each other."""
        for way in ("tensor", "pipeline", "data", "sequence"):
            degree = getattr(self.wants, f"{way}_parallel_size")
            if degree not in ("auto", 1) and way not in self.parallel:
                raise PlacementError(
                    f"roles.{self.role}.{way}_parallel_size",
                    f"{degree} is asked for, and engine '{self.engine}' cannot be {way}-parallel",
                    fix=f"{way}_parallel_size=1, or another engine",
                )
        self._check_group(largest_host)
        self._check_gpus()

    def _check_group(self, largest_host: int) -> None:
        tensor = self.pinned("tensor_parallel_size") or 1
        if tensor > largest_host:
            raise PlacementError(
                f"roles.{self.role}",
                f"no host has {tensor} GPUs for one tensor-parallel group ({tensor} asked, hosts have {largest_host})",
                fix=_smaller_groups(tensor, largest_host, "pipeline" in self.parallel),
            )
        heads = self.architecture.num_attention_heads if self.architecture else tensor
        if heads % tensor:
            raise PlacementError(
                f"roles.{self.role}.tensor_parallel_size",
                f"{tensor} GPUs cannot share the model's {heads} attention heads evenly",
                fix=f"tensor_parallel_size {gcd(tensor, heads)}",
            )

    def _check_gpus(self) -> None:
        gpus, tensor = self.pinned("gpus"), self.pinned("tensor_parallel_size")
        group = (tensor or 1) * (self.pinned("pipeline_parallel_size") or 1)
        group *= self.pinned("sequence_parallel_size") or 1
        copies = self.pinned("data_parallel_size") if "data" in self.parallel else None
        if gpus is not None and (gpus % group or (tensor and copies and group * copies != gpus)):
            degrees = f"tensor_parallel_size {tensor or 1}"
            degrees += f" and data_parallel_size {copies}" if copies is not None else ""
            raise PlacementError(
                f"roles.{self.role}.gpus",
                f"{gpus} GPUs cannot be used whole with {degrees} (groups of {group})",
                fix=f"gpus {group * copies}" if copies else f"gpus {max(1, gpus // group) * group}",
            )


def _smaller_groups(asked: int, largest: int, can_pipeline: bool) -> str:
    fitting = 1 << (largest.bit_length() - 1)
    stages = next((n for n in range(2, asked + 1) if asked % n == 0 and asked // n <= largest), None)
    way_out = f"tensor_parallel_size {fitting}"
    if can_pipeline and stages is not None:
        way_out += f", or pipeline_parallel_size {stages} with {asked // stages} each"
    return way_out
