"""Files that a recipe names, from strangers: clusters and models that crash a parser, fill the memory or take long."""

import json
from collections.abc import Mapping, Sequence

_QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
# Texts of a model's config.json.
CONFIGS = {
    "layers": json.dumps({**_QWEN, "num_hidden_layers": 2_000_000_000}),
    "layers of a hybrid": json.dumps({**_QWEN, "model_type": "qwen3_next", "num_hidden_layers": 2_000_000_000}),
    "a number for a list": json.dumps({**_QWEN, "mlp_only_layers": 5}),
    "a list of lists": json.dumps({**_QWEN, "mlp_only_layers": [[1]]}),
    "open brackets": '{"a":' * 100_000,
    "deep": '{"text_config":' * 500 + json.dumps(_QWEN) + "}" * 500,
    "a large file": json.dumps({**_QWEN, "a": "x" * 2**23}),
    "an escape code": json.dumps({"model_type": "\x1b[2J\x1b]0;owned\x07"}),
    "a long name": json.dumps({"model_type": "x" * 10**6}),
}
# The hosts of a cluster.
HOSTS = {
    "many GPUs": "{name: a, gpus: 200000, gpu: cpu}",
    "the most GPUs": "{name: a, gpus: 2147483647, gpu: cpu}",
    "memory": "{name: a, gpus: 1, gpu: cpu, memory_gib: 1.0e+300}",
    "an escape code": '{name: "\\e[2J", gpus: 1, gpu: cpu}',
}
FILES: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
    f"model: {name}": (
        {"config.json": text},
        ["recipe=grpo_7b", "cluster=1x8", "models.policy={path: PARTS, architecture: null, architecture_of: null}"],
    )
    for name, text in CONFIGS.items()
} | {
    f"cluster: {name}": (
        {"cluster/b.yaml": f"defaults: [/gpu@gpus.cpu: cpu]\nhosts: [{text}]"},
        ["recipe=grpo_tiny", "cluster=b"],
    )
    for name, text in HOSTS.items()
}
