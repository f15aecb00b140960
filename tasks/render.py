"""Stage 7: records become numbers, text and plots in the run folder."""

from configs.plans.paths import RunPaths
from reports.render import ReportSummary, render_report
from tasks.prefect_api.stages import stage


@stage("analyze and render", "report")
def render(run: RunPaths) -> ReportSummary:
    """Derive everything from raw samples and write `report.md` with its plots and tables."""
    return render_report(run)
