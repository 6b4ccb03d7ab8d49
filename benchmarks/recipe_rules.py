"""The rules that a recipe must keep, written by hand and without rlflow's own checks.

They are few and plain on purpose: a recipe that breaks one of them and is planned anyway is nonsense
that rlflow accepts.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

COUNTS = {
    "steps",
    "batch_size",
    "max_prompt_tokens",
    "group_size",
    "max_tokens",
    "num_minibatches",
    "num_epochs",
    "every",
    "num_prompts",
    "keep",
    "max_rounds",
    "buffer_tokens",
    "constant_length",
    "max_turns",
    "turn_tokens",
    "processes",
    "rank",
    "gpus",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "sequence_parallel_size",
    "micro_batch_tokens",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
}
"""Whole numbers from 1 that fit into 32 bits."""
SHARES = {"top_p", "gpu_memory_utilization", "lam", "gamma", "label_smoothing", "clip_eps"}
"""Numbers from 0 to 1."""
POSITIVE = {
    "learning_rate",
    "max_grad_norm",
    "alpha",
    "timeout_s",
    "timeout_minutes",
    "kl_target",
    "epsilon",
    "beta",
    "rope_theta",
}
NOT_NEGATIVE = {
    "weight_decay",
    "kl_coef",
    "entropy_coef",
    "temperature",
    "warmup_steps",
    "critic_warmup",
    "seed",
    "max_staleness",
}
FLAGS = {
    "normalize",
    "unbiased",
    "deterministic",
    "skip_truncated",
    "trust_remote_code",
    "random_weights",
    "tie_word_embeddings",
    "attention_bias",
}
"""Keys that are true or false."""
KEYS = {
    (): "name seed steps models roles graph data evaluation checkpoints expect overlap",
    ("data",): "source name split eval_split options columns system_prompt batch_size max_prompt_tokens overlong",
    ("evaluation",): "every num_prompts",
    ("checkpoints",): "every keep",
    ("expect",): "prompt_tokens response_tokens rounds",
    ("overlap",): "max_staleness in_flight deterministic",
    ("models", "*"): "path recipe random_weights characters architecture architecture_of dtype trust_remote_code",
    ("roles", "*", "optimizer"): "learning_rate schedule warmup_steps betas weight_decay max_grad_norm",
    ("roles", "*", "lora"): "rank alpha target_modules",
}
"""The keys of each section; ``*`` stands for any name."""
INPUTS = {"rollouts", "rewards", "reference", "values", "advantages", "kl", "old_logprobs", "greedy", "greedy_rewards"}
SOURCES = {"prompts", "examples", "pairs"}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def broken_rules(recipe: Any) -> list[str]:
    """Return what is wrong with a recipe; nothing for one that may be planned."""
    if not isinstance(recipe, Mapping):
        return ["a recipe is a mapping"]
    found = [*_broken_values(recipe, ()), *_broken_keys(recipe), *_broken_references(recipe), *_broken_warmups(recipe)]
    return [rule for rule in found if rule]


def _broken_values(value: Any, path: tuple[str, ...]) -> Iterator[str]:
    where, key = ".".join(path), path[-1] if path else ""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str) or _has_control_characters(name):
                yield f"{where}: a key is a text"
            yield from _broken_values(inner, (*path, str(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _broken_values(inner, path)
    elif isinstance(value, str):
        if _has_control_characters(value.replace("\n", "").replace("\t", "").replace("\r", "")):
            yield f"{where}: texts have no control characters"
        if "${" in value and ":" in value:
            yield f"{where}: a recipe calls no functions"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: numbers are finite"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{where}: whole numbers fit into 64 bits"
    if not {"options", "columns"} & set(path) and "graph" not in path[:-3:-1]:
        yield from _broken_number(key, value, where)


def _broken_number(key: str, value: Any, where: str) -> Iterator[str]:
    if key in FLAGS and value is not None and not isinstance(value, bool):
        yield f"{where}: true or false"
    if key not in COUNTS | SHARES | POSITIVE | NOT_NEGATIVE or value is None or value == "auto":
        return
    if isinstance(value, str) and "${" in value:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{where}: a number"
    elif key in COUNTS and not (isinstance(value, int) and 1 <= value < 2**31):
        yield f"{where}: a count"
    elif key in SHARES and not 0 <= value <= 1:
        yield f"{where}: a share"
    elif (key in POSITIVE and value <= 0) or (key in NOT_NEGATIVE and value < 0):
        yield f"{where}: not negative"
    elif (key in POSITIVE and value < 1e-20) or (key in POSITIVE | NOT_NEGATIVE and value > 1e20):
        yield f"{where}: not a typing mistake"
    elif key == "seed" and not isinstance(value, int):
        yield f"{where}: a whole number"


def _broken_keys(recipe: Mapping[str, Any]) -> Iterator[str]:
    for pattern, keys in KEYS.items():
        for section in _sections(recipe, pattern):
            if isinstance(section, Mapping) and (unknown := set(map(str, section)) - set(keys.split())):
                yield f"{'.'.join(pattern)}: unknown keys {sorted(unknown)}"
    for section_name in ("models", "roles", "graph"):
        section = recipe.get(section_name)
        if not isinstance(section, Mapping) or not section:
            yield f"{section_name}: names with their entries"
        elif not all(_NAME.fullmatch(str(name)) and str(name) not in (".", "..") for name in section):
            yield f"{section_name}: names are those of files"
    if not isinstance(recipe.get("name"), str) or not _NAME.fullmatch(recipe["name"]):
        yield "name: a name of a file"


def _sections(value: Any, pattern: tuple[str, ...]) -> Iterator[Any]:
    if not pattern:
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if pattern[0] in ("*", key):
                yield from _sections(inner, pattern[1:])


def _broken_references(recipe: Mapping[str, Any]) -> Iterator[str]:
    models, roles, graph = (recipe.get(key) for key in ("models", "roles", "graph"))
    if not (isinstance(models, Mapping) and isinstance(roles, Mapping) and isinstance(graph, Mapping)):
        return
    for name, role in roles.items():
        if not isinstance(role, Mapping):
            yield f"roles.{name}: a mapping"
            continue
        if role.get("model") not in _names(models):
            yield f"roles.{name}.model: one of the models"
        if role.get("follows") is not None and role["follows"] not in _names(roles):
            yield f"roles.{name}.follows: one of the roles"
        if role.get("follows") == name:
            yield f"roles.{name}.follows: another role"
    for name, node in graph.items():
        if not isinstance(node, Mapping):
            yield f"graph.{name}: a mapping"
            continue
        if node.get("role") is not None and node["role"] not in _names(roles):
            yield f"graph.{name}.role: one of the roles"
        for key in INPUTS & node.keys():
            if node[key] is not None and node[key] not in _names(graph) + sorted(SOURCES):
                yield f"graph.{name}.{key}: a node or a source"
            if node[key] == name:
                yield f"graph.{name}.{key}: another node"


def _broken_warmups(recipe: Mapping[str, Any]) -> Iterator[str]:
    for warmup in _sections(recipe, ("roles", "*", "optimizer", "warmup_steps")):
        if isinstance(warmup, int) and isinstance(recipe.get("steps"), int) and warmup > recipe["steps"]:
            yield "warmup_steps: no more than the steps of the run"


def _names(section: Mapping[Any, Any]) -> list[Any]:
    return list(section)


def _has_control_characters(text: str) -> bool:
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
