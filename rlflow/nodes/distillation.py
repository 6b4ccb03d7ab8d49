"""Learning what a teacher would have written."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlflow.batch import Logprobs, Packed, Rollouts, TokenAdvantages
from rlflow.nodes.base import Node
from rlflow.nodes.formula import Formula, old_probability
from rlflow.nodes.kl import token_kl


@dataclass(frozen=True, kw_only=True)
class TeacherAdvantage(Node, kind="teacher_advantage", unit="sample"):
    """Of each token log(teacher / policy), the policy's logprob being that of ``old_logprobs`` where such a node is
    there, else that of the engine that sampled it.

    A token is not judged by what comes after it. So the policy gradient is, in the mean over what might be sampled,
    that of the reverse KL divergence of the policy's next token from the teacher's, after what the policy has written.

    Source: the single-step part of MiniLLM's gradient (arXiv 2306.08543, section 2.2), as in
    https://thinkingmachines.ai/blog/on-policy-distillation; GKD (arXiv 2306.13649, section 3) on the policy's own
    responses alone, with the reverse KL divergence, estimated at the sampled token.
    """

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        where = {**old_probability(symbols), "p_teacher": f"p by {symbols['teacher']}"}
        return Formula(symbol="A", expression="log(p_teacher / p_old)", where=where)

    def run(self, rollouts: Rollouts, teacher: Logprobs, old_logprobs: Logprobs | None = None) -> TokenAdvantages:
        kl = token_kl("k1", rollouts, teacher, old_logprobs)
        values = Packed((-kl.values).astype(np.float32), kl.offsets)
        return TokenAdvantages(values=values, excluded=rollouts.failed)
