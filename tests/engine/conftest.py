"""Tests of models and training compute in one thread of their process.

Several test processes share the cores, and threads of torch spin on each other's: a test of 51 s took 21. Tests of
kernels and of inference keep as many threads as there are cores, since their code divides its work by them. Ranks that
a test starts have the threads that their cell says. `one_thread` is for modules of tiny models in other folders.
"""

from collections.abc import Iterator

import pytest
import torch

_ONE_THREAD = {"correctness", "loading", "models", "peers", "rank", "training"}


@pytest.fixture(scope="module", autouse=True)
def threads_of_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if _ONE_THREAD.intersection(request.path.parts):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread(threads_of_torch: None) -> None:
    torch.set_num_threads(1)
