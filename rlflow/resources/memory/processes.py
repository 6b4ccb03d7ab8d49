"""The memory of processes on CPUs: what is resident at the peak of each phase, as named terms in GiB.

A process holds the state of its roles all the time. Activations, logits and the KV cache come on top in the phase that
needs them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.phases import score_terms, update_terms
from rlflow.resources.memory.state import Terms, TrainingMemory, state_terms
from rlflow.resources.models.architecture import Architecture

LOCAL_PROCESS = "local"
"""The name of the process that holds all roles of a run on one CPU or GPU."""
Phase = Literal["generate", "score", "update", "sync"]

CPU_LOGITS_AT_ONCE = 2**20
"""The most logits that an output layer on a CPU computes at a time: about what its caches hold."""
# Bytes of each logit of a decoding step: fp32 and its log-softmax, then probabilities and their sums in fp64.
_SAMPLED_LOGIT_BYTES = 24
BUCKET_BYTES = 32 * 2**20
"""The most bytes of weights that are sent to an engine at a time; a larger tensor is sent alone."""


@dataclass(frozen=True, kw_only=True)
class RoleOnCpu:
    """One role of a process, with the largest amounts that it works on at once."""

    model: Architecture
    layout: Layout
    training: TrainingMemory
    trains: bool
    weight_bytes: float
    phases: frozenset[Phase]
    tokens: float
    """Tokens of a micro-batch."""
    sequences: float
    """Sequences that are generated at once."""
    longest: float
    """Tokens of the longest sequence."""
    serves: bool = False
    """The engine reserves its KV cache when it starts, and loads new weights beside those in use."""


def process_phases(roles: Sequence[RoleOnCpu], process_gib: float, *, sends: bool) -> Mapping[str, Terms]:
    """Return the terms of a process in each phase of its roles.

    ``process_gib`` is what it holds without a model. ``sends``: weights go to other processes.
    """
    state = _sum({"process": process_gib}, *(_state(role) for role in roles))
    phases: dict[str, Terms] = {}
    for phase in sorted({phase for role in roles for phase in role.phases}):
        working = [_work(role, phase) for role in roles if phase in role.phases]
        work = max(working, key=lambda terms: sum(terms.values()))
        buckets = {"buckets": _buckets_gib(roles)} if phase == "sync" and sends else {}
        phases[phase] = {name: gib for name, gib in _sum(state, work, buckets).items() if gib}
    return phases


def largest_process(processes: Mapping[str, Mapping[str, Terms]]) -> tuple[float, str]:
    """Return the GiB of the fullest process at its peak, and its name with the phase; 0 and no name without any."""
    peaks = [
        (sum(terms.values()), f"{process}, {phase}")
        for process, phases in processes.items()
        for phase, terms in phases.items()
    ]
    return max(peaks, default=(0.0, ""))


def _state(role: RoleOnCpu) -> Terms:
    if role.trains:
        return state_terms(role.model, role.layout, role.training)
    weights = role.weight_bytes * role.model.num_parameters / GIB
    # The C library keeps the memory of weights that were loaded.
    return {"weights": weights, "loading": weights, "kv": _kv_gib(role)} if role.serves else {"weights": weights}


def _buckets_gib(roles: Sequence[RoleOnCpu]) -> float:
    """Return the size of two buckets of weights: one is loaded while the next one is gathered."""
    largest = max(role.weight_bytes * role.model.num_parameters for role in roles)
    return 2 * min(BUCKET_BYTES, largest) / GIB


def _kv_gib(role: RoleOnCpu) -> float:
    return role.sequences * role.longest * role.model.kv_values_per_token * role.weight_bytes / GIB


def _work(role: RoleOnCpu, phase: Phase) -> Terms:
    """Return what a phase needs beyond the state. The formulas of the GPU count two bytes for each activation."""
    training = replace(role.training, logits_at_once=min(role.training.logits_at_once, CPU_LOGITS_AT_ONCE))
    size = role.weight_bytes / 2
    if phase == "update":
        terms = update_terms(role.model, role.layout, training, role.tokens)
        moving = {"activations": size * terms["activations"]}
        return moving | {name: terms[name] for name in ("logits", "gathered", "buckets") if name in terms}
    if phase == "score":
        terms = score_terms(role.model, role.layout, role.tokens, training=training)
        return {"activations": size * terms["activations"], "logits": terms["logits"], "gathered": terms["gathered"]}
    if phase == "generate":
        logits = {"logits": role.sequences * role.model.num_outputs * _SAMPLED_LOGIT_BYTES / GIB}
        return logits if role.serves else {"kv": _kv_gib(role)} | logits
    return {}


def _sum(*terms: Terms) -> dict[str, float]:
    names: Iterable[str] = dict.fromkeys(name for phase_terms in terms for name in phase_terms)
    return {name: sum(phase_terms.get(name, 0.0) for phase_terms in terms) for name in names}
