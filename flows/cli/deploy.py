"""`rankwise deploy-flows`: registers the project with the Prefect API that the environment names."""

import os
from pathlib import Path

from flows.prefect_settings import api_named_by_environment, prefect_environment, ui_url
from flows.team.setup import FOLDER_VARIABLE


def deploy(folder: Path, switch: dict[str, bool]) -> int:
    """Register, and say where to look. Raises ValueError where no API is named or it refuses."""
    url = api_named_by_environment()
    if url is None:
        raise ValueError(
            "no Prefect API is named: the one that `rankwise run` starts ends with it and runs no schedules. "
            "Start one that stays with `rankwise team up`, or set PREFECT_API_URL"
        )
    os.environ.update(prefect_environment(url))
    from flows.deploy import WORK_POOL, deploy_flows

    registered = deploy_flows(folder, switch)
    for line in registered.lines:
        print(line)
    print(f"flow runs work in {folder.absolute()}")
    for name, identifier in registered.deployments.items():
        print(f"  {name}: {ui_url(url)}/deployments/deployment/{identifier}")
    if FOLDER_VARIABLE not in os.environ:  # `rankwise team up` has one
        print(
            f"They need a Prefect worker: rankwise team up, or prefect worker start --pool {WORK_POOL} --type process"
        )
    return 0
