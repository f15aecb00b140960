"""`rankwise deploy-flows`: registers the project with the Prefect API that the environment names."""

import os
from pathlib import Path

from flows.server.settings import api_named_by_environment, prefect_environment, ui_url
from flows.team.setup import FOLDER_VARIABLE


def register_flows(folder: Path, switch: dict[str, bool]) -> int:
    """Register the project and print the URLs. Raises ValueError if no API is named or it refuses."""
    url = api_named_by_environment()
    if url is None:
        raise ValueError(
            "PREFECT_API_URL: not set (the API that `rankwise run` starts is temporary and runs no schedules). "
            "Start a permanent one with `rankwise team up`, or set PREFECT_API_URL"
        )
    os.environ.update(prefect_environment(url))
    from flows.registration.deployments import WORK_POOL, deploy_flows

    registered = deploy_flows(folder, switch)
    for line in registered.lines:
        print(line)
    print(f"working folder of flow runs: {folder.absolute()}")
    for name, identifier in registered.deployments.items():
        print(f"  {name}: {ui_url(url)}/deployments/deployment/{identifier}")
    if FOLDER_VARIABLE not in os.environ:  # `rankwise team up` has one
        print(
            f"A Prefect worker is required: rankwise team up, or prefect worker start --pool {WORK_POOL} --type process"
        )
    return 0
