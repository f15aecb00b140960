"""Automations that Rankwise ships: lost flow runs are marked as crashed; what a person wants to hear of is told.

    lines = ensure_automations(client)

Those that tell something send a notification through each block `rankwise-notifications`, which may be of any type that
Prefect can notify by (Slack, Microsoft Teams, e-mail, a webhook). Without one their firing is seen in the event feed
only. To register again is safe: an automation that somebody disabled stays so.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import Automation

from flows.server.settings import HEARTBEAT_SECONDS
from tasks.prefect_api.events import STUDY, Happened
from tasks.prefect_api.flow_names import HEARTBEAT_FLOWS, STUDY_FLOWS

NOTIFICATIONS_BLOCK = "rankwise-notifications"
ZOMBIES = "rankwise: flow runs that went without a word"
STUDY_FAILED, REGRESSION, BUDGET = "rankwise: study failed", "rankwise: regression found", "rankwise: budget near"
HEARTBEATS_MISSED_SECONDS = 3 * HEARTBEAT_SECONDS
_PAGE = 200


def zombie_automation() -> AutomationCore:
    """A flow run of ours whose heartbeats stop without a final state is marked as crashed.

    Flows of others on the same API send theirs as they like, by default every three minutes.

    A state of a run that is to start also ends the watch: the silence of an earlier attempt is not that of the next.
    Its final state alone does not do, since a heartbeat, which the run sends itself, may arrive after that. A run that
    is started and does not come up is the worker's to report.

    Source: https://docs.prefect.io/v3/advanced/detect-zombie-flows
    """
    ended = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended")
    starting = ("Scheduled", "AwaitingRetry", "Resuming", "Late", "AwaitingConcurrencySlot", "Pending")
    return AutomationCore(
        name=ZOMBIES,
        description="Its process was killed or its machine failed. Run the study again to resume it.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in ended + starting)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*HEARTBEAT_FLOWS]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=HEARTBEATS_MISSED_SECONDS),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {HEARTBEATS_MISSED_SECONDS} s")
        ],
    )


def telling_automations(notifications: Sequence[UUID]) -> list[AutomationCore]:
    """What a person wants to hear of. notifications: ids of blocks by which it is told; none: the event feed only."""
    failed = EventTrigger(
        expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*STUDY_FLOWS]},
        posture=Posture.Reactive,
        threshold=1,
    )
    because = "{{ event.resource.name }}: {{ event.payload.validated_state.message }}"
    return [
        _telling(STUDY_FAILED, "A study failed, crashed or was refused.", failed, because, notifications),
        _telling(
            REGRESSION,
            "A scheduled sweep is slower than the one before it.",
            _of(Happened.REGRESSION_FOUND),
            "{{ event.payload.message }}",
            notifications,
        ),
        _telling(
            BUDGET,
            "80 % of a study's budget of time or money are used.",
            _of(Happened.BUDGET_NEAR),
            "{{ event.resource.name }}: {{ event.payload.message }}",
            notifications,
        ),
    ]


def _of(happened: Happened) -> EventTrigger:
    return EventTrigger(
        expect={str(happened)},
        match={"prefect.resource.id": f"{STUDY}*"},
        posture=Posture.Reactive,
        threshold=1,
    )


def _telling(
    name: str, description: str, trigger: EventTrigger, body: str, notifications: Sequence[UUID]
) -> AutomationCore:
    actions: list[Any] = [SendNotification(block_document_id=block, subject=name, body=body) for block in notifications]
    return AutomationCore(name=name, description=description, trigger=trigger, actions=actions or [DoNothing()])


def ensure_automations(client: SyncPrefectClient) -> list[str]:
    """Create the automations, or bring them up to date. Returns a line on each."""
    notifications, unable = _notifications_blocks(client)
    lines = [_ensure(client, zombie_automation())]
    lines += [_ensure(client, wanted) for wanted in telling_automations(notifications)]
    lines += [f"block {NOTIFICATIONS_BLOCK} of type {kind}: cannot send notifications, not used" for kind in unable]
    if not notifications:
        lines.append(f"no block {NOTIFICATIONS_BLOCK}: automations tell the event feed only")
    return lines


def _ensure(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    found = _only_one(client, wanted.name)
    if found is None:
        client.create_automation(wanted)
        _only_one(client, wanted.name)
        return f"automation {wanted.name}: created"
    switch = "enabled" if found.enabled else "disabled"
    if _compared(found) != _compared(wanted):
        client.update_automation(found.id, wanted.model_copy(update={"enabled": found.enabled}))
        return f"automation {wanted.name}: updated, {switch}"
    return f"automation {wanted.name}: exists, {switch}"


def _only_one(client: SyncPrefectClient, name: str) -> Automation | None:
    """The automation of this name, if any, without doubles: two machines that register at once both create it.

    Each would tell or mark everything once more, and go on as it is when the other is brought up to date. All who
    look keep the same one; an enabled one, if there is any.
    """
    found = sorted(client.read_automations_by_name(name), key=lambda each: (not each.enabled, str(each.id)))
    for double in found[1:]:
        client.delete_automation(double.id)
    return found[0] if found else None


def _compared(automation: AutomationCore) -> tuple[Any, ...]:
    """Trigger and actions, without what the server adds."""
    actions = [action.model_dump(mode="json", exclude_none=True) for action in automation.actions]
    return automation.trigger.model_dump(exclude={"id"}), actions


def _notifications_blocks(client: SyncPrefectClient) -> tuple[list[UUID], list[str]]:
    """Ids of the blocks by which people are told, one of a type at most; and types of those that cannot tell."""
    able: list[UUID] = []
    unable: list[str] = []
    offset = 0
    while page := client.read_block_documents(offset=offset, limit=_PAGE, include_secrets=False):
        for document in page:
            if document.name != NOTIFICATIONS_BLOCK:
                continue
            if document.block_schema is not None and "notify" in document.block_schema.capabilities:
                able.append(document.id)
            else:
                unable.append(str(document.block_type_name))
        offset += len(page)
    return sorted(able), sorted(unable)
