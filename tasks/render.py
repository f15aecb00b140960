"""Stage 8: the analysis becomes text and plots in the run folder."""

from configs.plans.paths import RunPaths
from reports.render import Analysis, ReportSummary, render_analysis
from tasks.prefect_api.stages import stage


@stage("render", "render the report")
def render(run: RunPaths, analysis: Analysis) -> ReportSummary:
    """Write `report.md` with its plots and tables."""
    return render_analysis(run, analysis)
