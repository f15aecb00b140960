"""That somebody ended a run through Prefect's API: raised where the run waits, and no failure of its stages."""

from typing import Any

from prefect.client.schemas.objects import State


class RunCancelled(Exception):
    """The flow run was cancelled through the API."""

    def __init__(self, message: str = "cancelled with its run") -> None:
        super().__init__(message)


class RunSuspended(RunCancelled):
    """The flow run was suspended through the API: it ends like a cancelled one, and goes on when it is resumed."""

    def __init__(self, state: State[Any]) -> None:
        super().__init__("ended, as its run was suspended")
        self.state = state
