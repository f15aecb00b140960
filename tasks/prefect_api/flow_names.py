"""Names of this project's flows, as Prefect's UI, events and log records have them."""

SCALING_STUDY = "scaling study"
SHORT_STUDY = "study in short"
FORM_STUDY = "study from the form"
SCHEDULED_SWEEP = "scheduled sweep"
PUBLISHING = "publish a study"
LAUNCHES = "launches"

STUDY_FLOWS = (SHORT_STUDY, FORM_STUDY, SCHEDULED_SWEEP, SCALING_STUDY)
"""Flows that measure a study."""
HEARTBEAT_FLOWS = (*STUDY_FLOWS, PUBLISHING)
"""Flows whose runs send heartbeats; the subflow of launches sends none."""
FLOWS = frozenset({*HEARTBEAT_FLOWS, LAUNCHES})
