import pytest

from rlflow.errors import RecipeError
from rlflow.resources.time.lengths import Lengths, lengths_from


@pytest.mark.parametrize(("mean", "limit"), [(600, 4096), (3000, 4096), (100, 100), (1000, 32768)])
def test_cut_lengths_have_the_mean_that_was_asked_for(mean: float, limit: float) -> None:
    lengths = Lengths.log_normal(mean, limit)
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert lengths.longest == limit
    assert list(lengths.values) == sorted(lengths.values)


def test_a_mean_beyond_the_limit_is_the_limit() -> None:
    assert min(Lengths.log_normal(500, 100).values) == pytest.approx(100)


def test_the_shares_that_are_alive_add_up_to_the_mean() -> None:
    lengths = Lengths((2.0, 4.0, 6.0, 8.0))
    width = lengths.longest / len(lengths.survival)
    assert sum(lengths.survival) * width == pytest.approx(5.0)
    # Met at a random moment: half of the mean square, 30, over the mean.
    assert lengths.residual == pytest.approx(3.0)
    assert sum(lengths.residual_survival) * width == pytest.approx(3.0)


def test_equal_lengths_are_alive_to_the_end() -> None:
    lengths = Lengths((7.0, 7.0))
    assert lengths.survival == pytest.approx([1.0] * len(lengths.survival))
    assert lengths.relative_variance == 0
    # The remaining length falls evenly.
    assert lengths.residual_survival[0] > lengths.residual_survival[-1]


def test_the_longest_of_some() -> None:
    lengths = Lengths((1.0, 2.0, 3.0, 4.0))
    assert [lengths.longest_of(count) for count in (1, 3, 100)] == [3.0, 4.0, 4.0]


def test_measured_lengths_are_sorted_and_checked() -> None:
    assert lengths_from([5, 2, 9], 10, "lengths").values == (2, 5, 9)
    with pytest.raises(RecipeError, match="has no lengths"):
        lengths_from([], 10, "lengths")
    with pytest.raises(RecipeError, match="0 is not a number of tokens"):
        lengths_from([1, 0], 10, "lengths")


def test_lengths_end_at_the_limit() -> None:
    assert lengths_from([1, 11], 10, "lengths").values == (1, 10)
