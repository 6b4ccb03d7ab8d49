"""A record of what vLLM's engine does in each second."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlflow.system.compat.vllm import count_preemptions

_INTERVAL_S = 1.0


@dataclass(frozen=True)
class EngineActivity:
    """The engine's work in one second, or less if it ran out of work; a line of ``engines.jsonl``.

    There is none for time without work.
    """

    at: float
    """The end of the interval, in seconds since 1970."""
    seconds: float
    tokens: int
    """The tokens generated in the interval."""
    running: int
    """The requests in the running batch, at the end of the interval."""
    waiting: int
    """The requests that wait for room in the KV cache, at the end of the interval."""
    cache: float
    """The share of the KV cache that is used, at the end of the interval."""
    preemptions: int
    """The running requests that were preempted in the interval."""
    gpu: float | None = None
    """The mean utilization of the engine's GPUs, over at most the last second of the interval; None without GPUs."""


class ActivityRecorder:
    """Records the engine's activity from its thread; ``take`` may be called from any thread."""

    def __init__(self, engine: Any) -> None:
        """Record ``engine``, vLLM's LLMEngine with its core in this process."""
        self._scheduler = getattr(find_core(engine), "scheduler", None)
        self._gpus = _GpuUtilization(engine)
        self._intervals: list[EngineActivity] = []
        self._since = self._clock()
        self._finished_tokens = 0
        self._tokens_before = 0
        self._preemptions = 0
        if self._scheduler is not None:
            count_preemptions(self._scheduler, self._count_preemption)

    def _count_preemption(self) -> None:
        self._preemptions += 1

    def resume(self) -> None:
        """Start a new interval, after time without work."""
        self._since = self._clock()

    def record_step(self, finished: Sequence[Any], *, idle: bool) -> None:
        """Count a step of the engine and the outputs that it ``finished``; ``idle`` ends the interval."""
        self._finished_tokens += sum(len(output.outputs[0].token_ids) for output in finished)
        now = self._clock()
        if now - self._since < _INTERVAL_S and not idle:
            return
        live_tokens, running, waiting, cache = self._load()
        tokens = self._finished_tokens + live_tokens
        self._intervals.append(
            EngineActivity(
                at=time.time(),
                seconds=now - self._since,
                tokens=tokens - self._tokens_before,
                running=running,
                waiting=waiting,
                cache=cache,
                preemptions=self._preemptions,
                gpu=self._gpus.mean(),
            )
        )
        self._since, self._tokens_before, self._preemptions = now, tokens, 0

    def take(self) -> list[EngineActivity]:
        """Return the intervals since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals

    def _load(self) -> tuple[int, int, int, float]:
        """Return unfinished requests' tokens, the requests running and waiting, and the used share of the cache."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, 0, 0, 0.0
        live_tokens = sum(request.num_output_tokens for request in scheduler.requests.values())
        running, waiting = scheduler.get_request_counts()
        return live_tokens, running, waiting, float(scheduler.kv_cache_manager.usage)

    @staticmethod
    def _clock() -> float:
        return time.perf_counter()


def find_core(engine: Any) -> Any:
    """Return vLLM's EngineCore; None for an engine that has none in this process."""
    return getattr(getattr(engine, "engine_core", None), "engine_core", None)


class _GpuUtilization:
    """The utilization of this process's GPUs, as the driver reports it."""

    def __init__(self, engine: Any) -> None:
        self._handles: list[Any] = []
        config = getattr(engine, "vllm_config", None)
        if config is None or config.device_config.device_type != "cuda":
            return
        # vLLM's own copy of nvidia-ml-py.
        from vllm.third_party import pynvml

        self._nvml = pynvml
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            # The variable holds the driver's numbers of GPUs, or their UUIDs.
            names = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
            by_number, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            self._handles = [by_number(int(name)) if name.isdecimal() else by_name(name) for name in names]

    def mean(self) -> float | None:
        """Return the mean over all GPUs, between 0 and 1; None if the driver does not report it."""
        if self._handles:
            with suppress(self._nvml.NVMLError):
                percents: list[int] = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
                return sum(percents) / len(percents) / 100
        return None
