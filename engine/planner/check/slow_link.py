"""Predict the milliseconds of a token on small computers joined by Ethernet, from the rows of a fit file.

    predictions = predict(rows, fit)

Rows have model, num_devices, device, link (`1gbit-...`), weights and sync (q40, q80, f16, f32). Of `fit`,
token_milliseconds is read; the columns of computing, synchronisation and kilobytes are measured and never read.
"""

import re
from collections.abc import Sequence

from engine.planner.catalog import find_model
from engine.planner.check.rows import PublishedRow, RowPrediction, known_rows, positive_integer
from engine.planner.fitting.few import FewFit, fit_few
from engine.planner.timing.slow_link import SLOW_LINK, LinkedDevices

MEASURED = "token_milliseconds"
# Bytes of a number: 4 or 8 bits and a 16-bit scale for 32 (llama.cpp's Q4_0 and Q8_0, which distributed-llama takes).
_BYTES = {"q40": 18 / 32, "q80": 34 / 32, "f16": 2.0, "f32": 4.0}
# Bytes a second of memory: 32 bits of LPDDR4-3200 and LPDDR4X-4267, of which about a third reaches the cores of a
# Raspberry Pi 4 (assumption; the constant `memory` moves it).
_DEVICES = {"raspberry-pi-4b": 4.5e9, "raspberry-pi-5": 10e9, "raspberry-pi-3b": 2.2e9}


def predict(rows: Sequence[PublishedRow], fit_rows: Sequence[PublishedRow]) -> list[RowPrediction]:
    """One prediction a row; None with a reason for what is not known."""
    fitted = fitted_on(fit_rows)
    return [_predicted(row, fitted) for row in rows]


def fitted_on(rows: Sequence[PublishedRow]) -> FewFit[LinkedDevices]:
    """What measured rows teach; rows with unknown values are left out."""
    known, measured = known_rows(rows, MEASURED, cluster_of)
    return fit_few(SLOW_LINK, known, measured)


def cluster_of(row: PublishedRow) -> LinkedDevices:
    """What a row describes. Raises ValueError naming the column that is not known."""
    speed = re.match(r"(\d+\.?\d*|\.\d+)\s*(g|m)(?:bit|b)", row["link"].strip().lower())
    if speed is None or not float(speed[1]):
        raise ValueError(f"link: {row['link']!r} is not known; write its speed first, such as 1gbit-ethernet")
    stored, sent = (_format(row, name) for name in ("weights", "sync"))
    known = [rate for name, rate in _DEVICES.items() if row["device"].strip().lower().startswith(name)]
    if not known:
        raise ValueError(f"device: {row['device']!r} is not known; use one of: {', '.join(_DEVICES)}")
    architecture = find_model(row["model"])
    if architecture.kind != "decoder":
        raise ValueError(f"model: {row['model']} is not a decoder")
    return LinkedDevices(
        architecture=architecture,
        devices=positive_integer(row, "num_devices"),
        bytes_per_second=known[0],
        link_bytes_per_second=float(speed[1]) * (1e9 if speed[2] == "g" else 1e6) / 8,
        weight_bytes=stored,
        sync_bytes=sent,
    )


def _format(row: PublishedRow, column: str) -> float:
    found = _BYTES.get(row[column].strip().lower().replace("_", ""))
    if found is None:
        raise ValueError(f"{column}: {row[column]!r} is not known; use one of: {', '.join(_BYTES)}")
    return found


def _predicted(row: PublishedRow, fitted: FewFit[LinkedDevices]) -> RowPrediction:
    try:
        value, low, high = fitted.predict(cluster_of(row))
    except (ValueError, ZeroDivisionError) as error:
        return RowPrediction(None, str(error).splitlines()[0])
    support = f"{fitted.rows} measured points of such clusters" if fitted.rows else "data sheets and priors alone"
    return RowPrediction(value, interval=(low, high), support=support)
