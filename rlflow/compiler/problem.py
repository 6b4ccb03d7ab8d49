"""A recipe on a cluster that may not fit, and the changes to it that can be tried: planning again tells what helps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from rlflow.compiler.checks import check
from rlflow.compiler.graph import Graph
from rlflow.compiler.lower import Requirements, lower
from rlflow.compiler.wire import wire
from rlflow.errors import UserError
from rlflow.recipe import Recipe
from rlflow.resources.cluster import Cluster
from rlflow.resources.layout import Resources
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.search.search import Search
from rlflow.resources.time.calibration import Calibration

OPEN = Resources()


@dataclass(frozen=True)
class Pin:
    """A value that the recipe pins for a role."""

    role: str
    field: str
    value: object

    @property
    def path(self) -> str:
        """Return the path of the value in the recipe."""
        return f"roles.{self.role}.{self.field}"

    @property
    def text(self) -> str:
        """Return the value as the command line takes it."""
        value = self.value
        text = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else "null" if value is None else str(value)
        return text.lower() if isinstance(value, bool) else text

    def __str__(self) -> str:
        return f"{self.path}={self.text}"

    @property
    def opened(self) -> "Pin":
        """Return the same option with the value that leaves the choice to the planner."""
        return replace(self, value=getattr(OPEN, self.field))


@dataclass(frozen=True)
class Problem:
    """A recipe and its graph, the cluster it is planned for, and the efficiencies that times are predicted with."""

    recipe: Recipe
    graph: Graph
    cluster: Cluster
    calibration: Calibration
    margin: Margin = Margin.POSSIBLE
    """The room for the error of predictions with which a plan counts."""

    @property
    def pins(self) -> list[Pin]:
        """Return all values that the recipe pins."""
        return [
            Pin(name, field.name, value)
            for name, role in self.recipe.roles.items()
            for field in fields(Resources)
            if (value := getattr(role, field.name)) != getattr(OPEN, field.name)
        ]

    def requirements(self) -> Requirements:
        """Return what the recipe needs, whatever the cluster. Raises UserError for a recipe that cannot run there."""
        check(self.recipe, self.graph, self.cluster)
        return lower(self.recipe, self.graph)

    def search(self) -> Search:
        """Check and lower the recipe; return the search for its plan. Raises UserError if no cluster can run it."""
        needs = self.requirements()
        return Search(needs.demands, needs.workload, self.cluster, self.calibration)

    def best(self) -> SearchResult | None:
        """Return the best plan, or None."""
        try:
            best = self.search().best()
        except UserError:
            return None
        return best if best is not None and best.candidate.margin <= self.margin else None

    def fits(self) -> bool:
        """Return whether there is a plan."""
        try:
            return self.search().fits(self.margin)
        except UserError:
            return False

    def with_recipe(self, recipe: Recipe) -> "Problem":
        """Return the same problem for a changed recipe."""
        return replace(self, recipe=recipe, graph=wire(recipe))

    def with_pins(self, pins: Sequence[Pin]) -> "Problem":
        """Return the problem with these values of pins, and all others as they are."""
        roles = {
            name: replace(role, **cast(Any, {pin.field: pin.value for pin in pins if pin.role == name}))
            for name, role in self.recipe.roles.items()
        }
        return replace(self, recipe=replace(self.recipe, roles=roles))

    def without(self, pins: Sequence[Pin]) -> "Problem":
        """Return the problem with these pins open."""
        return self.with_pins([pin.opened for pin in pins])
