"""The text of a rendered report."""

from configs.plans.paths import RunPaths


def whole_report(run: RunPaths) -> str:
    """The report and the evidence behind it."""
    return run.report.read_text() + run.appendix.read_text()
