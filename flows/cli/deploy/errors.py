"""What ends a command on deployments, as a message.

with_user_errors(work)        # ValueError or OSError with one line, whatever cloud, host or model refused
"""

import sys
from collections.abc import Callable


def words_of(error: Exception) -> str:
    """Return what an error says; of the system's, which file."""
    if not isinstance(error, OSError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def with_user_errors(work: Callable[[], int]) -> int:
    """Run a command. Raises ValueError for what a user can mend."""
    from tasks.models.sources import TransientFetchError
    from tasks.providers.giving_back import LeftBehind
    from tasks.providers.rental import ProviderError

    try:
        return work()
    except (LeftBehind, ProviderError, TransientFetchError) as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(words_of(error)) from error
    except KeyboardInterrupt:
        print("interrupted; what was started has been ended. `rankwise deployments` lists the rest", file=sys.stderr)
        return 1
