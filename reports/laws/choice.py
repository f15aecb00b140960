"""Selection of the scaling law supported by the data, if any.

    found = support(fits, max_units)       # found.law, or None and the laws in found.among

A larger law is taken over a smaller one that it contains where the interval of what it adds leaves out 0,
which is the F test of the two at 5 %. The smaller one is taken only where what the larger adds is shown to
be small: less than MATTERS of the throughput at the most ranks measured, at the upper end of its
interval. Between those two the data cannot tell, as they often cannot from four points. Laws of which neither
contains the other (Gustafson's and the USL) are told apart by AICc (N. Sugiura, Comm. Stat. A7 (1978) 13-26).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log, sqrt

import numpy as np

from reports.laws.fit import EXACT, Fit, student
from reports.text import percent

MATTERS = 0.1
"""A term of a law that takes less than this share of the throughput at the most ranks is called small."""

DECISIVE = 4.0
"""Difference of AICc from which the worse law has little support (Burnham and Anderson 2002, section 2.6)."""

FALLS = "more ranks make it slower, which of these laws only the USL can follow"


@dataclass(frozen=True)
class Support:
    """The law that the data support; None where they cannot tell between those in `among`."""

    law: str | None
    among: tuple[str, ...]
    reason: str


def support(fits: Mapping[str, Fit], max_units: float) -> Support:
    """Choose among the laws fitted to points of up to `max_units` units."""
    if ("amdahl" in fits or "gustafson" in fits) and _faster_than_linear(fits["linear"]):
        return Support(None, (), "throughput grows faster than the ranks, which none of them can follow")
    if "amdahl" in fits:
        return _strong(fits, max_units)
    if "gustafson" in fits:
        return _weak(fits, max_units)
    return Support(None, (), "too few numbers of ranks for any law")


def _strong(fits: Mapping[str, Fit], most: float) -> Support:
    amdahl, usl = fits["amdahl"], fits.get("usl")
    serial = _verdict(amdahl, "serial_fraction", most - 1, 1.0)
    if usl is None:
        if _falls(amdahl, serial, fits["linear"]):
            return Support(None, (), FALLS)
        untested = "too few points to try the Universal Scalability Law"
        if serial == "there":
            return Support("amdahl", ("amdahl",), f"the interval of its serial fraction leaves out 0; {untested}")
        return _linear_or(serial, "amdahl", untested)
    sigma = usl.parameters["sigma"]
    crosstalk = _verdict(usl, "kappa", most * (most - 1), 1 + sigma * (most - 1))
    if crosstalk == "there":
        return Support("usl", ("usl",), "the interval of its kappa leaves out 0, so Amdahl's law does not hold")
    if crosstalk == "open":
        among = ("amdahl", "usl") if serial == "there" else ("linear", "amdahl", "usl")
        return Support(
            None, among, f"kappa may be 0, or may take over {percent(MATTERS, 2)} of the throughput at the most ranks"
        )
    small = f"kappa takes under {percent(MATTERS, 2)} of the throughput at the most ranks"
    if serial == "there":
        return Support("amdahl", ("amdahl",), f"the interval of its serial fraction leaves out 0, and {small}")
    return _linear_or(serial, "amdahl", small)


def _weak(fits: Mapping[str, Fit], most: float) -> Support:
    gustafson, usl = fits["gustafson"], fits.get("usl")
    serial = _verdict(gustafson, "serial_fraction", most - 1, most)
    why = "the interval of its serial fraction leaves out 0"
    if usl is None:
        if _falls(gustafson, serial, fits["linear"]):
            return Support(None, (), FALLS)
        if serial == "there":
            untested = "too few points to try the Universal Scalability Law"
            return Support("gustafson", ("gustafson",), f"{why}; {untested}")
        return _linear_or(serial, "gustafson", "")
    if serial != "there" and not any(usl.intervals[name][0] for name in ("sigma", "kappa")):
        return _linear_or(serial, "gustafson", "")
    ours, theirs = _aicc(gustafson), _aicc(usl)
    if theirs == inf:  # five points: AICc could never choose the USL, however far off Gustafson's law lies
        return _weak_of_few(gustafson, usl, why if serial == "there" else None)
    if theirs - ours >= DECISIVE and serial == "there":
        return Support("gustafson", ("gustafson",), f"{why}, and its AICc is lower by {DECISIVE:g} or more")
    if ours - theirs >= DECISIVE:
        return Support("usl", ("usl",), f"its AICc is lower than Gustafson's by {DECISIVE:g} or more")
    return Support(None, ("gustafson", "usl"), "linear is excluded, but both of these fit about as well")


def _weak_of_few(gustafson: Fit, usl: Fit, why: str | None) -> Support:
    """Gustafson's law, if shown (`why`), unless the USL lies nearer to the points by more than its parameter costs."""
    few = f"{len(usl.residuals)} points are too few for AICc to compare it with the Universal Scalability Law"
    if why is not None and _aic(gustafson) - _aic(usl) < DECISIVE:
        return Support("gustafson", ("gustafson",), f"{why}; {few}")
    few = f"{len(usl.residuals)} points are too few for AICc to compare these two"
    return Support(None, ("gustafson", "usl"), f"linear is excluded, and {few}")


def _linear_or(verdict: str, law: str, also: str) -> Support:
    tail = f"; {also}" if also else ""
    if verdict == "small":
        reason = f"a serial part takes under {percent(MATTERS, 2)} of the throughput at the most ranks{tail}"
        return Support("linear", ("linear",), reason)
    reason = f"the serial fraction may be 0, or may take over {percent(MATTERS, 2)} of the throughput at the most ranks"
    return Support(None, ("linear", law), reason + tail)


def _faster_than_linear(linear: Fit) -> bool:
    """Whether throughput grows as a power of the ranks above 1: the interval of the exponent leaves out 1."""
    exponent, reach = _exponent(linear)
    return exponent - reach > 1


def _falls(fit: Fit, serial: str, linear: Fit) -> bool:
    """Whether throughput falls with the ranks, where a law whose serial fraction is all of the work stays flat.

    Either the points are so far off flat that they set the fraction no bound, or the interval of the exponent of
    throughput as a power of the ranks lies below 0.
    """
    exponent, reach = _exponent(linear)
    return fit.parameters["serial_fraction"] == 1 and (serial != "there" or exponent + reach < 0)


def _exponent(linear: Fit) -> tuple[float, float]:
    """The exponent of throughput as a power of the ranks, and half the width of its interval."""
    x = np.log(list(linear.residuals))
    y = np.log1p(list(linear.residuals.values()))
    x, y, freedom = x - x.mean(), y - y.mean(), len(x) - 2
    slope = float(x @ y / (x @ x))
    error = sqrt(max(float(((y - slope * x) ** 2).sum()) / freedom, EXACT**2) / float(x @ x))
    return 1 + slope, student(freedom) * error


def _verdict(fit: Fit, parameter: str, weight: float, against: float) -> str:
    """`there`, `small`, or `open`: what a term of size parameter x weight, against the rest, is shown to be."""
    low, high = fit.intervals[parameter]
    if low is not None and low > 0:
        return "there"
    return "small" if high is not None and high * weight / against < MATTERS else "open"


def _aicc(fit: Fit) -> float:
    """Akaike's criterion corrected for few points; infinite where there are too few for it."""
    count = len(fit.residuals)
    parameters = _estimated(fit)
    if count <= parameters + 1:
        return inf
    return _aic(fit) + 2 * parameters * (parameters + 1) / (count - parameters - 1)


def _aic(fit: Fit) -> float:
    """Akaike's criterion, which favours the larger law where points are few."""
    count = len(fit.residuals)
    return count * log(fit.squares / count) + 2 * _estimated(fit)


def _estimated(fit: Fit) -> int:
    return len(fit.parameters) + 1  # and the variance
