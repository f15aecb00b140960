"""A deployment of one server that is not there, and places, hosts and fronts that note what is asked of them."""

from types import SimpleNamespace
from typing import Any, ClassVar

from configs.serving.deployment import Deployment, FrontConfig, PlacedServer
from configs.targets.target import SshTarget
from tasks.deployment.places import PlaceError
from tasks.deployment.store import Store
from tasks.providers.leases import open_ledger


def deployed(store: Store, *events: str) -> Deployment:
    """A deployment of one server, and a ledger that ends with these events."""
    folder = store.folder("one")
    folder.mkdir(parents=True)
    (folder / "key").write_text("secret\n")
    server = PlacedServer(generation=1, bundle="b-1", folder="x", port=1, local_port=1)
    made = Deployment(
        name="one", target="local:cpu", kind="local", url="http://127.0.0.1:9", front=str(folder / "front"),
        key_file=str(folder / "key"), bundle="b-1", servers=(server,),
        began_at=1.0, expires_at=4e9,
    )  # fmt: skip
    store.save(made)
    with open_ledger(folder) as ledger:
        for event in ("deploying", "deployed", *events):
            ledger.write(event)
    return made


class Placer:
    """Places nothing, and notes what it ends."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.here = None

    def place(self, bundle: Any, generation: int, together: Any, ready_seconds: float, check: Any) -> PlacedServer:
        return PlacedServer(generation=generation, bundle="b-2", folder=f"s{generation}", port=1, local_port=1)

    def end(self, server: PlacedServer) -> None:
        self.ended.append(server.generation)

    def backend(self, server: PlacedServer, draining: bool = False) -> Any:
        return SimpleNamespace(name=f"server-{server.generation}", draining=draining)


class RemoteHost:
    """A host that notes what is asked of it."""

    asked: ClassVar[list[str]] = []

    def __init__(self, target: SshTarget, number: int, folder: str) -> None:
        self.name, self.root = target.hosts[number].host, f"/home/me/{folder}"

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        self.asked.append(f"{self.name}: {operation} {arguments.get('folder') or arguments['paths'][0]}")
        return {"left": []}, b""


class WorkingFront:
    """A front that takes what it is given."""

    config = FrontConfig(key="k")

    def __init__(self, place: Any, folder: str) -> None:
        self.applied = list[Any]()

    def apply(self, config: Any) -> None:
        self.applied.append(config)

    def wait_until_idle(self, names: set[str], seconds: float) -> bool:
        return True


class LosingPlacer(Placer):
    """One whose machines cannot be reached when the servers with these numbers are to end."""

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self.lost = lost

    def end(self, server: PlacedServer) -> None:
        super().end(server)
        if server.generation in self.lost:
            raise PlaceError(None, "gpu-a: not reached")
