"""What vLLM's engine did in each second."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_EVERY_S = 1.0


@dataclass(frozen=True)
class EngineActivity:
    """An interval of a second, or less before an engine has nothing more to do. Without work there is none."""

    at: float
    """Its end, in seconds since 1970."""
    seconds: float
    tokens: int
    """Written in it."""
    running: int
    """Requests that are being written, at its end."""
    waiting: int
    """Requests that the engine has put off, for want of room, at its end."""
    cache: float
    """Of the room for keys and values, the share that is taken, at its end."""
    preemptions: int
    """Requests that were put off after they had been begun, within it."""
    gpu: float | None = None
    """Of the last second of it at most, the share in which the engine's GPUs computed, in the mean; None without."""


class Recorder:
    """Used from the engine's thread; ``take`` from any."""

    def __init__(self, engine: Any) -> None:
        """``engine`` is vLLM's LLMEngine, with its core in this process."""
        self._scheduler = scheduler_of(engine)
        self._gpus = _Gpus(engine)
        self._done: list[EngineActivity] = []
        self._since = self._clock()
        self._finished = 0
        self._before = 0
        self._preempted = 0
        if self._scheduler is not None:
            preempt = self._scheduler._preempt_request

            def counted(*arguments: Any, **named: Any) -> Any:
                self._preempted += 1
                return preempt(*arguments, **named)

            self._scheduler._preempt_request = counted

    def begin(self) -> None:
        """There is work again."""
        self._since = self._clock()

    def stepped(self, finished: Sequence[Any], *, idle: bool) -> None:
        """After a step: the outputs of requests that it has ended; ``idle`` when there is no work any more."""
        self._finished += sum(len(output.outputs[0].token_ids) for output in finished)
        now = self._clock()
        if now - self._since < _EVERY_S and not idle:
            return
        live, running, waiting, cache = self._load()
        tokens = self._finished + live
        self._done.append(
            EngineActivity(
                at=time.time(),
                seconds=now - self._since,
                tokens=tokens - self._before,
                running=running,
                waiting=waiting,
                cache=cache,
                preemptions=self._preempted,
                gpu=self._gpus.share(),
            )
        )
        self._since, self._before, self._preempted = now, tokens, 0

    def take(self) -> list[EngineActivity]:
        """All since it was last called."""
        done, self._done = self._done, []
        return done

    def _load(self) -> tuple[int, int, int, float]:
        """Tokens written of what is not done, requests running and waiting, and the share of the cache."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, 0, 0, 0.0
        live = sum(request.num_output_tokens for request in scheduler.requests.values())
        running, waiting = scheduler.get_request_counts()
        return live, running, waiting, float(scheduler.kv_cache_manager.usage)

    @staticmethod
    def _clock() -> float:
        return time.perf_counter()


def core_of(engine: Any) -> Any:
    """Return vLLM's EngineCore; None for an engine that has none in this process."""
    return getattr(getattr(engine, "engine_core", None), "engine_core", None)


def scheduler_of(engine: Any) -> Any:
    """Return vLLM's scheduler; None for an engine that has none in this process."""
    return getattr(core_of(engine), "scheduler", None)


class _Gpus:
    """Those of this process, which the driver tells of. Has never run on a GPU."""

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
            # The driver's numbers, or the names of GPUs.
            names = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
            by_number, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            self._handles = [by_number(int(name)) if name.isdecimal() else by_name(name) for name in names]

    def share(self) -> float | None:
        if self._handles:
            with suppress(self._nvml.NVMLError):
                percents: list[int] = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
                return sum(percents) / len(percents) / 100
        return None
