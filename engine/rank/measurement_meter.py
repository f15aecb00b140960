"""What a measurement used on its host: CPU time, storage traffic and wall time, as figures of its record."""

import time
from typing import TYPE_CHECKING

from configs.common.base import utc_now
from engine.rank import host_usage

if TYPE_CHECKING:
    from configs.records.record import Figure
    from engine.rank.processes import RankPlace


class MeasurementMeter:
    """CPU time, storage traffic and wall time since its creation; the first rank of a node reports the cores."""

    def __init__(self, place: "RankPlace") -> None:
        self._place = place
        self.started_at = utc_now()
        self._busy = host_usage.machine_busy_seconds(place.allowed) if place.local_rank == 0 else None
        self._storage = host_usage.storage_bytes()
        self._cpu = host_usage.process_cpu_seconds()
        self._began = time.perf_counter()

    def figures(self) -> dict[str, "Figure"]:
        """Return figures of the measurement so far; `cpu_busy_seconds` is of all processes on the job's cores."""
        measurement_seconds = time.perf_counter() - self._began
        cpu_seconds = host_usage.process_cpu_seconds() - self._cpu
        storage = host_usage.storage_bytes()
        figures: dict[str, Figure] = {
            "measurement_seconds": measurement_seconds,
            "cpu_seconds": cpu_seconds,
            "cpu_utilization": cpu_seconds / measurement_seconds / len(self._place.cores),
            "threads": self._place.threads,
            **self._place.binding,
            "io_read_bytes": storage.read - self._storage.read if storage and self._storage else None,
            "io_write_bytes": storage.written - self._storage.written if storage and self._storage else None,
        }
        if self._place.local_rank == 0:
            busy = host_usage.machine_busy_seconds(self._place.allowed)
            figures["machine_cores"] = len(self._place.allowed)
            figures["cpu_busy_seconds"] = None if busy is None or self._busy is None else busy - self._busy
        return figures
