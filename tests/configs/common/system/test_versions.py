"""Versions of distributions are looked up, whether they are installed or not."""

import numpy as np

from configs.common.system.versions import version_of


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert version_of("numpy") == np.__version__
    assert version_of("no-such-distribution") is None
