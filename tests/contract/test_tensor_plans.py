"""The model types that the planner divides by tensor parallelism have plans for it in transformers."""

import pytest
from transformers import AutoConfig

from rlflow.resources.models.architecture import CUT_TYPES

KNOWN = {"colwise", "rowwise", "replicated_with_grad_allreduce"}


@pytest.mark.parametrize("model_type", sorted(CUT_TYPES))
def test_their_plans_cut_attention_and_mlps_in_known_styles(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    experts = tuple(config.base_model_ep_plan or ())
    plan = {
        name: style for name, style in config.base_model_tp_plan.items() if not experts or not name.startswith(experts)
    }
    assert set(plan.values()) <= KNOWN
    attention = {f"layers.*.self_attn.{name}_proj" for name in "qkvo"}
    assert attention <= plan.keys()
    assert experts or "layers.*.mlp.down_proj" in plan
