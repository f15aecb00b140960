"""The collector of cycles: what was set apart is not looked through, and is given back afterwards."""

import gc

import pytest

from reports.reading.collecting import set_apart, uncollected


@pytest.fixture(autouse=True)
def nothing_frozen() -> None:
    """A command that a test has run in this process freezes all before it ends."""
    gc.unfreeze()


def test_set_apart_gives_back_what_it_took() -> None:
    assert gc.get_freeze_count() == 0
    with set_apart():
        taken = gc.get_freeze_count()
        assert taken > 1000
        with set_apart():
            pass
        assert gc.get_freeze_count() > 0, "the inner one has given back what the outer one took"
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_collector_is_as_it_was_whatever_happens() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), set_apart():
        _ = 1 / 0
    assert gc.get_freeze_count() == 0
