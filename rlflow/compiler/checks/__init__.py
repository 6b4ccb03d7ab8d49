"""The stage check: one list of rules about a recipe and its graph.

What a rule knows about one algorithm stands in the file of its node (``Node.check`` and ``Node.check_graph``).
"""

from rlflow.compiler.checks.data import check_data, check_modules
from rlflow.compiler.checks.evaluation import check_evaluation
from rlflow.compiler.checks.graph import check_groups, check_options, check_outputs_read, check_sources
from rlflow.compiler.checks.learning import check_learning
from rlflow.compiler.checks.learning import check_run as check_run
from rlflow.compiler.checks.models import (
    check_adapters,
    check_micro_batches,
    check_on_cluster,
    check_output_layers,
    check_positions,
    check_reward_models,
)
from rlflow.compiler.checks.responses import check_responses
from rlflow.compiler.checks.roles import check_heads, check_roles
from rlflow.compiler.checks.schedule import check_overlap, check_resampling, check_turns
from rlflow.compiler.graph import Graph
from rlflow.recipe import Recipe
from rlflow.resources.cluster import Cluster

RULES = (
    check_options,
    check_modules,
    check_outputs_read,
    check_evaluation,
    check_heads,
    check_roles,
    check_sources,
    check_groups,
    check_resampling,
    check_turns,
    check_overlap,
    check_reward_models,
    check_data,
    check_learning,
    check_output_layers,
    check_responses,
    check_positions,
    check_adapters,
    check_micro_batches,
)


def check(recipe: Recipe, graph: Graph, cluster: Cluster | None = None) -> None:
    """Apply all rules to a recipe and its graph. Raises RecipeError and GraphError.

    Raises PlacementError for a pinned micro-batch that is smaller than the longest sequence: another pin helps. So it
    does for a model that no GPU of the cluster can compute.
    """
    for rule in RULES:
        rule(recipe, graph)
    if cluster is not None:
        check_on_cluster(recipe, cluster)
