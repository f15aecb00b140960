"""Stage 7: records become numbers, text and plots in the run folder."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.plans.paths import RunPaths
from reports.render import ReportSummary, render_report


@task(name="analyze and render", task_run_name="report", cache_policy=NO_CACHE)
def render(run: RunPaths) -> ReportSummary:
    """Derive everything from raw samples and write `report.md` with its plots and tables."""
    return render_report(run)
