"""Weights on their way from a trained role to the roles that follow it, after every step.

``sync.sync_weights`` has two ways. Through the hosts' object stores: every rank of the trainer gathers the weights in
buckets of bounded size (``engines/buckets.py``), rank 0 puts each bucket into its store, and every engine loads it
while the trainer gathers the next one. This works for all engines, and is repeated when it fails.

From GPU to GPU: vLLM's own senders and receivers, by CUDA IPC on the same GPUs and by NCCL between others (``gpu``).

Each copy carries the number of the step as the weights' version, which the engines write on every token that they
generate with them.
"""
