"""What the ledger of a rental says in order: each request for nodes, how it ended, and for how long they were up."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from configs.plans.rentals import RentalAttempt


def attempts_of(
    entries: Sequence[dict[str, Any]], now: float, billed_when_off: bool = False
) -> tuple[RentalAttempt, ...]:
    """Return all requests of a rental, those of runs that were killed too.

    Nodes cost money from the answer of the create call to the end of giving back, at most until their lease ended
    (billed_when_off: longer, a cloud charges for nodes that have powered themselves off); those that are up, until
    `now` (seconds since 1970). Of that, nodes were unused that never became ready, and those
    of a run that ended until the next one took them over, or until they ended, where none did (`abandoned`).
    """
    found: list[RentalAttempt] = []
    since: dict[int, float] = {}
    unused: dict[int, float] = {}
    abandoned: dict[int, float] = {}
    lease_ends, taken_over = now, 0.0
    for entry in entries:
        event, epoch = entry["event"], float(entry.get("epoch", now))
        if event in ("opened", "extended", "kept"):
            lease_ends = float(entry.get("expires_at", now))
            if found and event != "opened":
                more = float(entry.get("unused_seconds", 0))
                unused[len(found) - 1] = unused.get(len(found) - 1, 0.0) + more
                taken_over = epoch if more else taken_over
        elif event == "ready" and found:
            unused.setdefault(len(found) - 1, 0.0)
        elif event == "create":
            found.append(
                RentalAttempt(
                    at=datetime.fromtimestamp(epoch, UTC).isoformat(timespec="seconds"),
                    region=entry["region"],
                    zone=entry.get("zone"),
                    market=entry["market"],
                    usd_per_hour=entry.get("usd_per_hour"),
                )
            )
        elif event == "created" and found:
            since[len(found) - 1] = epoch
            found[-1] = found[-1].model_copy(update={"nodes": len(entry.get("ids", ())) or None})
        elif event == "no_nodes" and found:
            found[-1] = found[-1].model_copy(update={"problem": entry["problem"]})
        elif event == "abandoned" and since:
            ended = epoch if billed_when_off else min(epoch, lease_ends)
            # Of several tries to give them back the last counts.
            abandoned[len(found) - 1] = max(0.0, ended - max(taken_over, float(entry.get("last_used", ended))))
        elif event == "given_back":
            ends = epoch if billed_when_off else lease_ends
            _close(found, since, min(epoch, max(ends, *since.values())) if since else epoch)
    unused = dict.fromkeys(since, 0.0) | unused
    _close(found, since, now if billed_when_off else min(now, lease_ends))
    for place, seconds in abandoned.items():
        unused[place] = unused.get(place, found[place].seconds) + seconds
    return tuple(
        attempt.model_copy(update={"unused_seconds": min(attempt.seconds, unused.get(place, attempt.seconds))})
        for place, attempt in enumerate(found)
    )


def _close(found: list[RentalAttempt], since: dict[int, float], end: float) -> None:
    """Count the time of attempts whose nodes were up until now."""
    for place, began in since.items():
        found[place] = found[place].model_copy(update={"seconds": max(0.0, end - began)})
    since.clear()
