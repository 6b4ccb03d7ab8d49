"""The pins of a pool, from those of its roles."""

from rlflow.resources.planner.search.pool_pins import PoolPins, pool_pins
from tests.unit.resources.planner.planning import demand


def test_pins_of_a_pool() -> None:
    """Groups that the pool must contain, and its sizes where all of its roles pin how many copies they have."""
    engine = demand("rollout", parallel=frozenset({"data", "tensor"}), tensor_parallel_size=4, data_parallel_size=3)
    assert pool_pins([engine], 8) == PoolPins(frozenset({12}), None, ((4, 3),))
    assert pool_pins([engine, demand("actor")], 8) == PoolPins(None, None, ((4, 3), (1, 1)))
    assert pool_pins([engine, demand("actor", gpus=63)], 8) == PoolPins(frozenset({63}), 63, ((4, 3), (1, 63)))
