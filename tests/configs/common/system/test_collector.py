"""The collector rests while modules are imported, and forgets nothing that is made after it."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from configs.common.system.collector import imported_for_good


class Node:
    """In a circle with itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_stays_and_later_garbage_goes() -> None:
    with imported_for_good("not_there"):
        assert not gc.isenabled()
        before = Node()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    kept, gone = weakref.ref(before), weakref.ref(Node())
    del before
    gc.collect()
    assert kept() is not None and gone() is None


def test_a_collector_that_was_off_stays_off_and_an_error_turns_it_on_again() -> None:
    with pytest.raises(ImportError), imported_for_good("not_there"):
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with imported_for_good("not_there"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_process_that_has_computed_since_keeps_its_collector() -> None:
    before = gc.get_freeze_count()
    with imported_for_good("gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
