"""How many files and sockets a process may have open.

allow_connections()          # first of all in a process that has one for each request
"""

import resource
from contextlib import suppress


def allow_connections() -> None:
    """Raise the limit of open files, 1,024 on many machines, to what this user may have: one for each connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # what is missing is told by the requests that could not be sent
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
