"""A worker process around an engine, here in the process of the tests."""

import gc
from collections.abc import Iterator

import pytest

from rlflow.runtime.ray.worker import EngineWorker
from tests.helpers import spec


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_later_collections_of_garbage_leave_out_libraries_and_engine() -> None:
    gc.unfreeze()  # an earlier test may have built a worker
    before = len(gc.get_objects())
    EngineWorker().build("fake", spec())
    assert gc.get_freeze_count() >= before / 2
    assert len(gc.get_objects()) < before / 10
