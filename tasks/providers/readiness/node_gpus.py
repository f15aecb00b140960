"""GPUs that rented nodes show. One whose driver has failed computes on its cores, for the price of its GPUs.

    gpus_of_instance("aws", "g4dn.xlarge")                   # 1
    lacking_gpus(folder, "ubuntu", addresses, request, 1)    # {"198.51.100.7": "shows 0 of 1 GPU: ..."}
    wait_for_gpus(folder, "ubuntu", named, request, 120.0, pause)     # ProviderError naming the nodes

NVIDIA's are asked of `nvidia-smi`, AMD's are nodes of the kernel's driver, as in `engine.planner.accelerators`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from configs.common.printable import plural, printable
from configs.hardware.catalog import catalog
from configs.hardware.hardware import Machine
from configs.hardware.node_names import Cloud
from tasks.providers.connections import run_there
from tasks.providers.rental import ProviderError, RentalRequest

_NVIDIA, _AMD = "nvidia-smi -L", "cat /sys/class/kfd/kfd/topology/nodes/*/gpu_id"
_ANSWER_SECONDS = 90.0
"""The driver of eight GPUs takes half a minute to start where nothing keeps it loaded."""
_AT_ONCE = 16
_REMEDY = (
    "Ranks would compute on the cores, for the price of the GPUs. Use an image whose driver works; a study may measure "
    "on the cores with `device: cpu` of the target"
)


def gpus_of_instance(provider: Cloud, instance: str) -> int:
    """Return how many GPUs an instance has by the catalog; 0: none, or the catalog does not know it."""
    machine = _machine(provider, instance)
    return 0 if machine is None or machine.accelerator.kind not in ("cuda", "rocm") else machine.accelerators


def has_amd_gpus(request: RentalRequest) -> bool:
    """Return whether the GPUs of the instance are AMD's, for which the vendors' images have no driver."""
    machine = _machine(request.provider, request.instance)
    return machine is not None and machine.accelerator.kind == "rocm"


def lacking_gpus(
    folder: Path, user: str, addresses: Sequence[str], request: RentalRequest, count: int
) -> dict[str, str]:
    """Return what is wrong with the GPUs of nodes that show fewer than `count`, by address; asked side by side."""
    if not count or not addresses:
        return {}
    command = _AMD if has_amd_gpus(request) else _NVIDIA
    with ThreadPoolExecutor(min(len(addresses), _AT_ONCE)) as pool:
        found = pool.map(partial(_lacking, folder, user, command, count), addresses)
        return {address: why for address, why in zip(addresses, found, strict=True) if why is not None}


def wait_for_gpus(
    folder: Path,
    user: str,
    named: Mapping[str, str],
    request: RentalRequest,
    seconds: float,
    pause: Callable[[], None],
) -> None:
    """Return when all nodes show the GPUs of the request. named: their ids by address. pause: between two looks.

    Raises ProviderError naming each node that does not after so many seconds, and what its driver says.
    """
    deadline, waiting = time.monotonic() + seconds, list(named)
    while lacking := lacking_gpus(folder, user, waiting, request, request.gpus_per_node):
        if time.monotonic() > deadline:
            told = "; ".join(f"{named[address]} ({address}) {why}" for address, why in lacking.items())
            raise ProviderError("hardware", "", f"{told}. {_REMEDY}")
        waiting = list(lacking)
        pause()


def _lacking(folder: Path, user: str, command: str, count: int, address: str) -> str | None:
    done = run_there(folder, user, address, command, _ANSWER_SECONDS)
    if done is None:
        return f"no answer to `{command}` within {_ANSWER_SECONDS:g} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    shown = [line for line in lines if (line.startswith("GPU ") if command == _NVIDIA else line.isdigit())]
    gpus = sum(line != "0" for line in shown)  # the cores are a node of AMD's driver, too, with 0
    if gpus >= count:
        return None
    said = next((line for line in lines if line not in shown), "")
    return f"shows {gpus} of {plural(count, 'GPU')}" + (f": {printable(said, 200)}" if said else "")


def _machine(provider: Cloud, instance: str) -> Machine | None:
    try:
        return catalog().listed_instance(f"{provider}/{instance}")
    except ValueError:
        return None
