"""What is registered beside the deployments, against an API that is a list in memory."""

import threading
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import BlockDocument, BlockSchema
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from configs.common.files.project_files import project_file
from flows.registration import deployments
from flows.registration.automations import NOTIFICATIONS_BLOCK, STUDY_FAILED, ensure_automations

WEBHOOK, SLACK, SECRET = UUID(int=1), UUID(int=2), UUID(int=3)


class Listed:
    """The API: automations and blocks. `beside`: what others register while one is created here."""

    def __init__(self, blocks: Sequence[BlockDocument] = ()) -> None:
        self.blocks = list(blocks)
        self.automations: list[Automation] = []
        self.beside = False

    def read_block_documents(self, offset: int, limit: int, include_secrets: bool) -> list[BlockDocument]:
        assert not include_secrets
        return self.blocks[offset : offset + limit]

    def read_automations_by_name(self, name: str) -> list[Automation]:
        return [each for each in self.automations if each.name == name]

    def create_automation(self, wanted: AutomationCore) -> UUID:
        for _ in range(1 + self.beside):
            self.automations.insert(0, Automation(id=uuid4(), **dict(wanted)))
        return self.automations[0].id

    def update_automation(self, identifier: UUID, wanted: AutomationCore) -> None:
        self.delete_automation(identifier)
        self.automations.insert(0, Automation(id=identifier, **dict(wanted)))

    def delete_automation(self, identifier: UUID) -> None:
        self.automations = [each for each in self.automations if each.id != identifier]

    @property
    def client(self) -> SyncPrefectClient:
        return cast(SyncPrefectClient, self)


def block(identifier: UUID, kind: str, *capabilities: str, name: str = NOTIFICATIONS_BLOCK) -> BlockDocument:
    kind_id = uuid4()
    schema = BlockSchema(checksum="sha256:0", block_type_id=kind_id, capabilities=list(capabilities))
    return BlockDocument(
        id=identifier,
        name=name,
        block_schema_id=uuid4(),
        block_schema=schema,
        block_type_id=kind_id,
        block_type_name=kind,
    )


@pytest.mark.parametrize(
    ("blocks", "told_by"),
    [
        ([block(SECRET, "Secret"), block(SLACK, "Slack Webhook", "notify")], [SLACK]),
        ([block(SLACK, "Slack Webhook", "notify"), block(WEBHOOK, "Custom Webhook", "notify")], [WEBHOOK, SLACK]),
        ([block(SECRET, "Secret")], []),
        ([block(SLACK, "Slack Webhook", "notify", name="another")], []),
    ],
)
def test_people_are_told_through_every_block_that_can(blocks: list[BlockDocument], told_by: list[UUID]) -> None:
    api = Listed(blocks)
    lines = ensure_automations(api.client)
    actions: list[Any] = api.read_automations_by_name(STUDY_FAILED)[0].actions
    assert [action.block_document_id for action in actions if isinstance(action, SendNotification)] == told_by
    assert told_by or isinstance(actions[0], DoNothing)
    unable = f"block {NOTIFICATIONS_BLOCK} of type Secret: cannot send notifications, not used"
    assert (unable in lines) == any(each.id == SECRET for each in blocks)
    assert (f"no block {NOTIFICATIONS_BLOCK}: automations tell the event feed only" in lines) == (not told_by)


def test_two_machines_that_register_at_once_leave_one_automation_of_each() -> None:
    api = Listed()
    api.beside = True
    ensure_automations(api.client)
    names = [each.name for each in api.automations]
    assert len(names) == len(set(names)) == 4


def test_doubles_of_an_older_version_are_removed_and_what_is_enabled_stays_so() -> None:
    api = Listed()
    ensure_automations(api.client)
    doubles = [each.model_copy(update={"id": UUID(int=4 + i)}) for i, each in enumerate(api.automations)]
    disabled = [each.model_copy(update={"enabled": False}) for each in doubles]
    api.automations = [*disabled, *api.automations]
    lines = ensure_automations(api.client)
    assert sum(line.endswith(": exists, enabled") for line in lines) == len(api.automations) == 4


def test_a_server_that_is_locked_for_long_is_asked_more_often_than_prefect_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()

    class Locked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            self.send_response(503)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        with pytest.raises(deployments.DeployError, match="503"):
            deployments._prefect_deploy(tmp_path, project_file("prefect.yaml"))
        server.shutdown()
    assert asked and max(asked.values()) == 9, asked


def test_credentials_that_a_file_of_the_working_folder_holds_go_to_prefect_deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts in the folder of the flow runs, and was refused there: the `.env` lay where the user stood."""
    given: dict[str, str] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        given.update(env)
        return SimpleNamespace(returncode=0)

    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):  # which an earlier test may have left, and which win
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(deployments.subprocess, "run", run)
    with temporary_settings({PREFECT_API_URL: "https://lab.example.org/api", PREFECT_API_AUTH_STRING: "team:word"}):
        deployments._prefect_deploy(tmp_path, project_file("prefect.yaml"))
    assert given["PREFECT_API_URL"] == "https://lab.example.org/api"
    assert given["PREFECT_API_AUTH_STRING"] == "team:word" and given["PWD"] == str(tmp_path)
