"""Fitted constants as a file: `configs/catalog/engine_constants.json`, written by `make planner-constants`.

calibrated = shipped()                          # what `rankwise plan` uses for other people's engines
write(calibrated, path, "published/inference_throughput.csv")
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

import configs
from configs.common.files.reading import read_json_object
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.fit import FittedDeviations
from engine.planner.engines.residuals import ResidualProcess, RowPlace

SHIPPED = Path(configs.__file__).parent / "catalog" / "engine_constants.json"
_DIGITS = 6


def write(calibrated: CalibratedEngines, path: Path, source: str) -> None:
    """Write what was fitted. source: the file of rows."""
    fitted, residuals = calibrated.fitted, calibrated.residuals
    count = len(fitted.order)
    data = {
        "source": source,
        "rows": len(residuals.places),
        "width": round(calibrated.width, _DIGITS),
        "device_widths": {name: round(width, _DIGITS) for name, width in calibrated.device_widths.items()},
        "deviations": {
            name: round(float(value), _DIGITS) for name, value in zip(fitted.order, fitted.deviations, strict=True)
        },
        "covariance": [[round(float(fitted.covariance[i, j]), _DIGITS) for j in range(i + 1)] for i in range(count)],
        "measured": [
            [place.engine, place.device, place.model, [round(number, 4) for number in place.numbers], place.queues,
             round(float(error), 5)]
            for place, error in zip(residuals.places, residuals.errors, strict=True)
        ],
        "kinds": [[engine, kind, rows] for (engine, kind), rows in fitted.rows.items()],
    }  # fmt: skip
    path.write_text(_compact(data))


def read(path: Path) -> CalibratedEngines:
    """Read what `write` wrote."""
    data = read_json_object(path)
    order = tuple(data["deviations"])
    covariance = np.zeros((len(order), len(order)))
    for row, values in enumerate(data["covariance"]):
        covariance[row, : row + 1] = covariance[: row + 1, row] = values
    rows = {(engine, kind): count for engine, kind, count in data["kinds"]}
    fitted = FittedDeviations(order, np.array(list(data["deviations"].values())), covariance, rows)
    places = [
        RowPlace(engine, device, model, tuple(at), queues) for engine, device, model, at, queues, _ in data["measured"]
    ]
    errors = np.array([row[-1] for row in data["measured"]], dtype=np.float64)
    return CalibratedEngines(fitted, ResidualProcess.learn(places, errors), data["width"], data["device_widths"])


@functools.cache
def shipped() -> CalibratedEngines:
    """Return the constants of the catalog; priors alone if the file is missing from this checkout."""
    return read(SHIPPED) if SHIPPED.is_file() else CalibratedEngines.none()


def _compact(data: dict[str, Any]) -> str:
    """One line for each entry of a table, so that a diff shows rows."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(row) for row in value)
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, indent=1)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
