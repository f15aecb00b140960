"""NumPy's and SciPy's linear algebra on one thread.

    with one_blas_thread():
        inverse = np.linalg.inv(covariance)        # some hundred rows

OpenBLAS shares even such a matrix among all cores, and its threads spin while they wait for one whose core is taken:
beside two busy processes on two cores the same products took four times the CPU time.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit the BLAS libraries that are loaded to one thread, in this process only: nothing that it starts inherits it.

    Also a decorator.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(limits=1, user_api="blas"):
        yield
