"""From a recipe to a plan, in pure functions: wire, lower, plan; and render, which draws it."""
