"""Linear algebra on one thread."""

import numpy as np
import pytest
from scipy import linalg
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from configs.common.system.blas import one_blas_thread


def threads() -> list[int]:
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]


def test_libraries_of_numpy_and_scipy_have_one_thread_inside_and_their_own_after() -> None:
    assert linalg.inv(np.eye(2)).shape == np.linalg.inv(np.eye(2)).shape
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        assert before and set(before) == {2}
        with one_blas_thread():
            assert set(threads()) == {1}
        assert threads() == before
        with pytest.raises(ZeroDivisionError), one_blas_thread():
            raise ZeroDivisionError
        assert threads() == before


def test_a_function_has_it_in_every_call() -> None:
    inside = one_blas_thread()(threads)
    with threadpool_limits(2, user_api="blas"):
        assert set(inside()) == set(inside()) == {1}
        assert set(threads()) == {2}
