"""Muon against torch's own, a singular value decomposition, and AdamW."""

from typing import Any

import pytest
import torch

from rlflow.engines.causal_lm.muon import Muon, is_matrix, orthogonalize
from rlflow.recipe import Optimizer as Options


def random_weights(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(weights: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_matrices_take_the_steps_of_torchs_own_muon() -> None:
    """Torch's orthogonalizes in bfloat16, so that an update of 5 steps of size 0.02 differs by less than a tenth."""
    options = Options(learning_rate=0.1, weight_decay=0.1, kind="muon")
    shapes = [(24, 8), (8, 24), (16, 16)]
    mine, theirs, start = (random_weights(*shapes) for _ in range(3))
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer = Muon([{"params": mine, "matrices": True}, {"params": [other], "matrices": False}], options)
    peer = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step()
        peer.step()  # type: ignore[no-untyped-call]
    for weight, same, first in zip(mine, theirs, start, strict=True):
        assert (weight - same).norm() < 0.02 * (same - first).norm()


def test_other_weights_take_adamws_steps_exactly() -> None:
    options = Options(learning_rate=0.01, weight_decay=0.1, betas=(0.8, 0.9), kind="muon")
    (matrix,), mine, theirs = random_weights((4, 4)), random_weights((5,), (6, 3)), random_weights((5,), (6, 3))
    optimizer = Muon([{"params": [matrix], "matrices": True}, {"params": mine, "matrices": False}], options)
    peer = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), fused=True)
    for step in range(3):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step()
        peer.step()
    assert all(torch.equal(weight, same) for weight, same in zip(mine, theirs, strict=True))
    assert not optimizer.state[matrix]  # it had no gradient


def test_singular_vectors_stay_and_singular_values_become_equal() -> None:
    """Each expert's matrix by itself, with singular values from 1 to 100."""
    experts = torch.stack([torch.diag(torch.logspace(0, 2, 8)) @ torch.randn(8, 20) for _ in range(3)])
    for before, after in zip(experts, orthogonalize(experts), strict=True):
        left, values, right = torch.linalg.svd(before, full_matrices=False)
        inner = left.T @ after @ right.T
        assert float((inner - torch.diag(inner.diagonal())).abs().max()) < 0.01
        large = values > values.max() / 30  # smaller ones rise, but not that far in five steps
        assert float(inner.diagonal()[large].min()) > 0.6
        assert float(inner.diagonal().max()) < 1.25


def test_embeddings_heads_and_vectors_are_not_matrices_of_layers() -> None:
    square, vector = torch.zeros(4, 4), torch.zeros(4)
    assert is_matrix("model.layers.10.mlp.up_proj.weight", square)
    assert not is_matrix("model.layers.10.input_layernorm.weight", vector)
    assert not is_matrix("model.embed_tokens.weight", square)
    assert not is_matrix("lm_head.weight", square)


@pytest.mark.parametrize("shape", [(0, 4), (4, 4)])
def test_a_gradient_of_zeros_changes_nothing(shape: tuple[int, int]) -> None:
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))
