"""Deployments of this user, as files below the data folder.

<data>/deployments/<name>/deployment.json  key  ledger.jsonl  front/  servers/  tunnels/  measuring-<token>/
<data>/bundles/<model>-<id>/bundle.json

The ledger has a line before everything that is started, as that of rented nodes has.
"""

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from configs.common.base import WrongArgument, write_atomically
from configs.common.files.reading import read_model
from configs.common.printable import printable
from configs.serving.deployment import Deployment, ServingBundle
from tasks.deployment.bundles import read_bundle
from tasks.providers.leases import open_ledger, read_entries

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MEASURING = "measuring-"


@dataclass(frozen=True)
class Store:
    """Folders: data of deployments and bundles, ledgers of rentals, models."""

    data: Path
    rented: Path
    cache: Path

    @property
    def bundles(self) -> Path:
        """All bundles."""
        return self.data / "bundles"

    def folder(self, name: str) -> Path:
        """That of one deployment. Raises WrongArgument for a name that is none: the folder is removed in the end."""
        if not _NAME.fullmatch(name):
            raise WrongArgument(
                f"--name: got {printable(repr(name), 80)}, expected letters, digits, '.', '_' and '-', at most 64, a "
                "letter or digit first"
            )
        return self.data / "deployments" / name

    def measuring_folder(self, name: str) -> Path:
        """Name a new run folder of a deployment, in which a bundle is measured and its evidence stays.

        Its path is another one in each container: clusters and hosts that several share know a run by it.
        """
        return self.folder(name) / f"{_MEASURING}{secrets.token_hex(4)}"

    def measuring_folders(self, name: str) -> list[Path]:
        """Return the run folders in which the bundles of a deployment were measured."""
        return sorted(self.folder(name).glob(f"{_MEASURING}*"))

    def save(self, deployment: Deployment) -> None:
        """Write a deployment."""
        write_atomically(
            self.folder(deployment.name) / "deployment.json", deployment.model_dump_json(indent=1), mode=0o600
        )

    def read(self, name: str) -> Deployment:
        """Read a deployment. Raises WrongArgument naming those that there are."""
        path = self.folder(name) / "deployment.json"
        if not path.exists():
            known = ", ".join(each.name for each in self.all()) or "none"
            raise WrongArgument(f"{name}: no deployment of this name. Known: {known}")
        return read_model(path, Deployment)

    def all(self) -> list[Deployment]:
        """Return all deployments whose files can be read, by name."""
        return [one for one in self._files().values() if isinstance(one, Deployment)]

    def damaged(self) -> dict[str, str]:
        """Return what is wrong with files that cannot be read, by the deployment's name: the others go on."""
        found = {name: str(one) for name, one in self._files().items() if not isinstance(one, Deployment)}
        return {name: str(one) for name, one in self._events().items() if isinstance(one, Exception)} | found

    def _files(self) -> dict[str, Deployment | Exception]:
        found: dict[str, Deployment | Exception] = {}
        for path in sorted((self.data / "deployments").glob("*/deployment.json")):
            try:
                found[path.parent.name] = read_model(path, Deployment)
            except FileNotFoundError:  # taken down meanwhile
                continue
            except (OSError, ValueError) as error:
                found[path.parent.name] = error
        return found

    def bundle(self, deployment: Deployment) -> ServingBundle:
        """Return the bundle that a deployment serves."""
        return read_bundle(self.bundles, deployment.bundle)

    def forget(self, name: str) -> None:
        """Remove the folder of a deployment of which nothing runs."""
        shutil.rmtree(self.folder(name), ignore_errors=True)

    def unfinished(self) -> list[str]:
        """Return names of deployments whose process died between the first start and the end.

        One that serves is finished, whatever became of a later rollout: its servers go on. One whose ledger cannot be
        read is damaged.
        """
        found = []
        for name, last in self._events().items():
            folder = self.data / "deployments" / name
            serves = (folder / "deployment.json").exists() and last != "undeploying"
            if not isinstance(last, Exception) and not serves and last not in ("deployed", "undeployed"):
                found += [name] if _is_free(folder) else []
        return found

    def _events(self) -> dict[str, str | Exception]:
        """The last event of each deployment's ledger, or why it cannot be read."""
        found: dict[str, str | Exception] = {}
        for path in sorted((self.data / "deployments").glob("*/ledger.jsonl")):
            try:
                entries = read_entries(path)
            except (OSError, ValueError) as error:
                found[path.parent.name] = error
            else:
                found[path.parent.name] = str(entries[-1]["event"]) if entries else "undeployed"
        return found


def _is_free(folder: Path) -> bool:
    """Whether no command is at work on a deployment; one that this user may not write is left to its owner."""
    try:
        with open_ledger(folder, only_looks=True):
            return True
    except (OSError, ValueError):
        return False
