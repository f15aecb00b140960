"""`rankwise forecast RUN`: how the scaling of a finished run goes on, over the interconnect that is named.

The report of the run says the same for the interconnect that its study names (docs/forecast.md).
"""

from pathlib import Path

from configs.hardware import Machine
from configs.paths import RunPaths
from configs.plan import Plan, PlannedForecast
from configs.study import Forecast
from flows.cli.errors import plainly
from flows.cli.tables import print_table


def print_forecast(folder: Path, to: int | None, machine: str | None) -> int:
    """As the command does it. Returns the exit code; raises ValueError for what is wrong, a file's error among it."""
    return plainly(lambda: _print_forecast(folder, to, machine))


def _print_forecast(folder: Path, to: int | None, machine: str | None) -> int:
    """Print every scaling experiment's forecast. Returns the exit code. Raises ValueError for what is not known."""
    from reports.experiments.scaling import scaling
    from reports.planning.forecast import forecast_lines, forecast_sentence, forecast_table, study_forecast
    from reports.reading.load import load_study

    study = load_study(RunPaths(folder))
    plan = _with_forecast(study.plan, to, machine)
    study = type(study)(study.folder, plan, study.cells, study.readings, study.environments)
    experiments = [item for item in plan.experiments if item.kind in ("strong", "weak") and item.points]
    if not experiments:
        raise ValueError(f"{folder}: no experiment of kind strong or weak, so there is no scaling to forecast")
    for experiment in experiments:
        found = study_forecast(study, scaling(study, experiment))
        print(f"{experiment.kind} scaling, {study.title(experiment)}")
        if found is None or isinstance(found, str):
            print(f"  {found or 'Nothing is forecast: it takes two world sizes of a model that were measured.'}\n")
            continue
        print(f"  {forecast_sentence(found)}")
        table = forecast_table(found)
        print_table(table.columns, table.rows, words=0)
        print("\n".join(f"  - {line}" for line in forecast_lines(found)) + "\n")
    return 0


def _with_forecast(plan: Plan, to: int | None, machine: str | None) -> Plan:
    """The plan with what the command line says instead of the study."""
    most = Forecast.model_fields["to"].default
    if to is not None and not 1 <= to <= most:
        raise ValueError(f"--to {to}: use 1 to {most}")
    over: Machine | None = plan.forecast.machine
    if machine is not None:
        from configs.hardware_catalog import instance

        over = instance(machine)
    return plan.model_copy(update={"forecast": PlannedForecast(to=to or plan.forecast.to, machine=over)})
