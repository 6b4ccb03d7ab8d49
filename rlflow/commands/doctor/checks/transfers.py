"""Checks of transfers: tensors to another process on the same GPU, and between GPUs."""

import os
import time
from collections.abc import Mapping
from typing import Any

from rlflow.commands.doctor.checks.models import ANSWER_TIMEOUT_S
from rlflow.commands.doctor.finding import Finding
from rlflow.system.ports import free_port

# The embedding of Qwen2.5-7B in bfloat16: 152,064 x 3,584, the largest tensor of most colocated runs.
_EMBEDDING = (152_064, 3_584)
_ROUNDS = 5
# NCCL's own benchmark reaches 0.7 to 0.9 of a data sheet with messages of 1 GB; below half something is wrong.
_MIN_SHARE = 0.5


def ipc_copy(device: str, *, shape: tuple[int, int] = _EMBEDDING) -> list[Finding]:
    """Send a tensor of 1.09 GB to another process on the same GPU, as a weight sync does; compare the sums."""
    import torch
    import torch.multiprocessing as processes

    embedding = (
        torch.arange(shape[0] * shape[1], dtype=torch.int32).remainder_(251).to(torch.bfloat16).view(shape).to(device)
    )
    context = processes.get_context("spawn")
    to_child, answers = context.SimpleQueue(), context.Queue()
    child = context.Process(target=_sum_received, args=(to_child, answers), daemon=True)
    child.start()
    to_child.put(embedding)
    began = time.perf_counter()
    received = answers.get(timeout=ANSWER_TIMEOUT_S)
    seconds = time.perf_counter() - began
    # The sender's memory must outlive every use of it by the receiver.
    child.join(ANSWER_TIMEOUT_S)
    expected = int(embedding.to(torch.int64).sum())
    size = embedding.nbytes / 1e9
    return [
        Finding.compare(
            f"copy of {size:.2f} GB to another process",
            f"sum {received} after {seconds:.1f} s, its start included",
            f"sum {expected}",
            received == expected,
        )
    ]


def _sum_received(tensors: Any, answers: Any) -> None:
    import torch

    answers.put(int(tensors.get().to(torch.int64).sum()))


def all_reduce(
    device: str,
    *,
    ranks: int,
    link_gb_s: float | None,
    network_gb_s: float | None,
    elements: int = 2**28,
) -> list[Finding]:
    """Measure the bus bandwidth of an all-reduce of 1 GiB over all GPUs of this host.

    The first measurement uses the links between the GPUs and expects a share of ``link_gb_s``. The second disables
    links and shared memory, so that NCCL uses the network cards, and expects a share of ``network_gb_s``. With None the
    bandwidth is measured and nothing is expected.
    """
    paths = [("over its links", link_gb_s, dict[str, str]())]
    if device.startswith("cuda"):
        paths.append(("over the network", network_gb_s, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}))
    findings = []
    for path, data_sheet, environment in paths:
        seconds = all_reduce_seconds(device, ranks, elements, environment)
        # Bus bandwidth as nccl-tests defines it: what each link carries, whatever the number of ranks.
        speed = 2 * (ranks - 1) / ranks * 4 * elements / seconds / 1e9
        name = f"all-reduce of {4 * elements / 2**30:.2g} GiB on {ranks} GPUs, {path}"
        if data_sheet is None:
            findings.append(
                Finding.compare(name, f"{speed:.3g} GB/s", "any value: the bandwidth of this GPU is unknown", True)
            )
        else:
            findings.append(Finding.at_least(name, speed, _MIN_SHARE * data_sheet, " GB/s"))
    return findings


def all_reduce_seconds(device: str, ranks: int, elements: int, environment: Mapping[str, str] = {}) -> float:
    """Return the seconds of one all-reduce, the fastest of several, on the slowest rank.

    The processes of the ranks have the variables of ``environment`` besides this one's.
    """
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    port, answers = free_port(), context.Queue()
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        workers = [
            context.Process(target=_reduce, args=(device, rank, ranks, port, elements, answers), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    seconds = max(answers.get(timeout=ANSWER_TIMEOUT_S) for _ in range(ranks))
    for worker in workers:
        worker.join(ANSWER_TIMEOUT_S)
    return float(seconds)


def _reduce(device: str, rank: int, ranks: int, port: int, elements: int, answers: Any) -> None:
    import torch
    from torch import distributed

    on_gpu = device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    tensor = torch.ones(elements, device=device)
    fastest = float("inf")
    for attempt in range(1 + _ROUNDS):
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        # The first one is not timed, because it sets up the communicator.
        fastest = min(fastest, time.perf_counter() - began) if attempt else fastest
        tensor.fill_(1.0)
    answers.put(fastest)
    distributed.destroy_process_group()
