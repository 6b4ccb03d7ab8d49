"""Reward functions in the styles of other libraries, written as their users write them."""

import asyncio
import re
from functools import partial
from typing import Any

import numpy as np


# TRL: prompts, completions and completion_ids by name, and each column as a list.
def trl_column(completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0 if completion == right else 0.0 for completion, right in zip(completions, answer, strict=True)]


def trl_brief(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    return [-float(len(completion)) for completion in completions]


def trl_conversation(completions, **kwargs):  # type: ignore[no-untyped-def]
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*</think>$", content) else 0.0 for content in contents]


def trl_by_task(prompts, completions, task, **kwargs):  # type: ignore[no-untyped-def]
    """Judge one task, and have nothing to say about the others."""
    return [float("4" in text) if kind == "math" else None for text, kind in zip(completions, task, strict=True)]


def trl_tokens(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(ids)) for ids in completion_ids]


async def trl_async(completions, **kwargs):  # type: ignore[no-untyped-def]
    async def judge(completion: str) -> float:
        await asyncio.sleep(0)
        return float(len(completion))

    return await asyncio.gather(*[judge(completion) for completion in completions])


def trl_metric(completions, log_metric=None, log_extra=None, **kwargs):  # type: ignore[no-untyped-def]
    log_extra("length", [len(completion) for completion in completions])
    log_metric("share_of_digits", sum(text.isdigit() for text in completions) / len(completions))
    return [1] * len(completions)


def trl_keyword_only(*, completions, scale=1.0, **kwargs):  # type: ignore[no-untyped-def]
    return [scale * len(completion) for completion in completions]


def trl_nan(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float("nan") for _ in completions]


def trl_system_message(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float(prompt[0]["role"] == "system") for prompt in prompts]


class TrlObject:
    """A callable object, as TRL's own rewards with options are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids) <= self.limit) for ids in completion_ids]


trl_object = TrlObject(2)


def trl_threshold(completions, threshold, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(completion)) * (len(completion) > threshold) for completion in completions]


trl_partial = partial(trl_threshold, threshold=1)


# verl: one response a call; the manager "batch" passes lists.
def verl_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    return 1.0 if solution_str.strip() == ground_truth else 0.0


def verl_dictionary(data_source, solution_str, ground_truth, extra_info=None, **kwargs):  # type: ignore[no-untyped-def]
    is_right = ground_truth in solution_str
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": solution_str}


def verl_by_source(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    return len(solution_str) if data_source == "lengths" else extra_info["index"]


def verl_options(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):  # type: ignore[no-untyped-def]
    return float(solution_str == ground_truth) + bonus


def verl_short(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    return -len(solution_str)


async def verl_async(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return {"score": float(len(solution_str))}


def verl_bool(solution_str, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    return solution_str == ground_truth


def verl_lists(data_sources, solution_strs, ground_truths, extra_infos):  # type: ignore[no-untyped-def]
    return [float(text == right) for text, right in zip(solution_strs, ground_truths, strict=True)]


# OpenRLHF: lists of prompts with responses, of prompts, and of labels. It returns tensors, which NumPy stands for.
def openrlhf_tensor(queries, prompts, labels):  # type: ignore[no-untyped-def]
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return np.array([float(text == label) for text, label in zip(responses, labels, strict=True)])


def openrlhf_without_end(queries, prompts, labels):  # type: ignore[no-untyped-def]
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return [float(text.removesuffix("<|end|>") == label) for text, label in zip(responses, labels, strict=True)]


def openrlhf_dictionary(queries, prompts, labels, **kwargs):  # type: ignore[no-untyped-def]
    rewards = np.array([float(f"|>{label}<|" in query) for query, label in zip(queries, labels, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards, "constant": 0.5}}


def openrlhf_template(queries, prompts, labels):  # type: ignore[no-untyped-def]
    return [float(len(query.split("<|assistant|>")[1])) for query in queries]


# rlflow's own style.
def own_tokens(texts, rows, *, token_ids, finish_reasons):  # type: ignore[no-untyped-def]
    return [len(ids) if reason == "stop" else -1 for ids, reason in zip(token_ids, finish_reasons, strict=True)]


async def own_async(texts, rows, *, factor: float = 1.0):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return [factor * len(text) for text in texts]


def own_none(texts, rows):  # type: ignore[no-untyped-def]
    return [None if text == "12" else 1.0 for text in texts]


def own_dictionary(texts, rows):  # type: ignore[no-untyped-def]
    return [{"score": len(text), "words": 1, "is_number": text.isdigit(), "text": text} for text in texts]


# Functions that are refused, or that fail.
def trl_one_value(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0]


def trl_other_column(completions, ground_truths, **kwargs):  # type: ignore[no-untyped-def]
    return [float(text == right) for text, right in zip(completions, ground_truths, strict=True)]


def wrong_names(answers, questions):  # type: ignore[no-untyped-def]
    return [1.0 for _ in answers]


def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0]


def trl_state(completions, trainer_state, **kwargs):  # type: ignore[no-untyped-def]
    return [float(trainer_state.global_step) for _ in completions]


def trl_state_if_any(completions, trainer_state=None, **kwargs):  # type: ignore[no-untyped-def]
    return [float(trainer_state.global_step if trainer_state else 0) for _ in completions]


def trl_state_inside(completions, **kwargs):  # type: ignore[no-untyped-def]
    state = kwargs.get("trainer_state")
    return [float(state.global_step if state else 0) for _ in completions]


trl_state_in_a_part = partial(trl_state_inside, scale=2)


def trl_environments(completions, environments, **kwargs):  # type: ignore[no-untyped-def]
    return [environment.reward for environment in environments]


def verl_unknown(solution_str, ground_truth, tokenizer):  # type: ignore[no-untyped-def]
    return 0.0


def without_score(texts, rows):  # type: ignore[no-untyped-def]
    return [{"reward": 1.0} for _ in texts]
