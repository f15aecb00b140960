"""One run of a study in this process: as a Prefect flow where the API answers, else as a plain function.

    ended = run_here(study, runs, base, plan=plan, unavailable=why_unavailable())
    ended.result, ended.unpublished

Measuring never depends on a server. Results that the API did not get are published later (`flows.publishing`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from configs.plans.plan import Plan
from configs.spec.study import StudySpec
from flows.publishing import publish_run
from flows.scaling_study import Handover, RunSummary, handed_over, scaling_study
from tasks.prefect_api.api import api_error_text

_END_SECONDS = 10.0
"""So long a run that has its report waits for an API that went away."""


@dataclass(frozen=True)
class Ended:
    """How a run ended. `result`: a state where it was cancelled. `unpublished`: why the API has no report."""

    result: RunSummary | State[Any]
    unpublished: str | None


def run_here(
    study: StudySpec,
    runs: Path,
    base: Path,
    only_failed: bool = False,
    accept_environment: bool = False,
    plan: Plan | None = None,
    unavailable: str | None = None,
    on_report: Callable[[RunSummary], None] = lambda _: None,
    agreed_to_rent: bool = False,
) -> Ended:
    """Run a study. Raises what ends the run.

    unavailable: why the API cannot be used (`tasks.prefect_api.api.why_unavailable`); None: with Prefect.
    on_report: called with the result once the report is written; a busy API may take a minute more to publish it.
    agreed_to_rent: a person has seen what the nodes of rented targets cost.
    """
    handover = Handover(plan, _END_SECONDS, on_report, agreed_to_rent)
    with handed_over(handover):
        why = unavailable
        if why is None:
            why = _as_flow(handover, study, runs, only_failed, accept_environment, base)
        if why is not None and not handover.began:
            scaling_study.fn(study, runs, only_failed, accept_environment, base)
    if handover.error is not None:
        raise handover.error
    assert handover.result is not None
    if handover.published or not isinstance(handover.result, RunSummary):
        return Ended(handover.result, why)
    return Ended(handover.result, publish_run(Path(handover.result.folder)))


def _as_flow(handover: Handover, study: StudySpec, *parameters: Any) -> str | None:
    """Call the flow. Returns why Prefect could not record it, before its first line or after its last."""
    try:
        state = scaling_study(study, *parameters, return_state=True)
    except Exception as error:  # the API's; the study's own are in the handover
        return api_error_text(error)
    if not handover.began:  # ended through the API before it began
        handover.began, handover.result = True, state
    return None
