"""`rankwise forecast RUN`: forecast the scaling of a finished run for a given interconnect.

The run's report contains the same forecast for the interconnect of its study (docs/explanation/forecast.md).
"""

from dataclasses import replace
from pathlib import Path

from configs.common.base import WrongArgument
from configs.hardware.hardware import Machine
from configs.plans.plan import Plan, PlannedForecast
from configs.spec.study import ForecastSpec
from flows.cli.errors import plainly
from flows.cli.results.inspect import open_run
from flows.cli.tables import print_table


def print_forecast(folder: Path, to: int | None, machine: str | None) -> int:
    """Run the command. Returns the exit code; raises ValueError for wrong arguments and file errors."""
    return plainly(lambda: _print_forecast(folder, to, machine))


def _print_forecast(folder: Path, to: int | None, machine: str | None) -> int:
    """Print every scaling experiment's forecast. Returns the exit code. Raises WrongArgument for unknown names."""
    from reports.experiments.scaling import scaling
    from reports.planning.forecast import forecast_lines, forecast_sentence, forecast_table, study_forecast
    from reports.reading.devices import load_comparable

    run, _ = open_run(folder)
    study = load_comparable(run)
    plan = _with_forecast(study.plan, to, machine)
    study = replace(study, plan=plan)
    experiments = [item for item in plan.experiments if item.kind in ("strong", "weak") and item.points]
    if not experiments:
        raise WrongArgument(f"{folder}: no forecast, expected an experiment of kind strong or weak")
    for experiment in experiments:
        found = study_forecast(study, scaling(study, experiment))
        print(f"{experiment.kind} scaling, {study.title(experiment)}")
        if found is None or isinstance(found, str):
            print(f"  {found or 'No forecast: requires measurements of a model at two world sizes.'}\n")
            continue
        print(f"  {forecast_sentence(found)}")
        table = forecast_table(found)
        print_table(table.columns, table.rows, words=0)
        print("\n".join(f"  - {line}" for line in forecast_lines(found)) + "\n")
    return 0


def _with_forecast(plan: Plan, to: int | None, machine: str | None) -> Plan:
    """Return the plan with the command line's overrides."""
    most = ForecastSpec.model_fields["to"].default
    if to is not None and not 1 <= to <= most:
        raise WrongArgument(f"--to: got {to}, expected 1 to {most}")
    over: Machine | None = plan.forecast.machine
    if machine is not None:
        from configs.hardware.catalog import instance

        try:
            over = instance(machine)
        except ValueError as error:
            raise WrongArgument(str(error)) from error
    return plan.model_copy(update={"forecast": PlannedForecast(to=to or plan.forecast.to, machine=over)})
