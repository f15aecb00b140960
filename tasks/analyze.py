"""Stage 7: records become figures, verdicts, fits and recommendations."""

from configs.plans.paths import RunPaths
from reports.render import Analysis, analyze_run
from tasks.prefect_api.stages import stage


@stage("analyze", "analyze")
def analyze(run: RunPaths) -> Analysis:
    """Derive everything from the raw samples of the run folder."""
    return analyze_run(run)
