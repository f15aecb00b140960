"""The rentals of a study's targets, rented and given back side by side on a bounded number of threads. No Prefect here.

group = RentalGroup({"g5": nodes, "l4": others}, agreed=True)
group.begin({"g5"})         # returns at once; what the run does meanwhile costs no rented time of its own
hosts = group.up("g5")      # waits; raises what ended the first rental that failed, and then all others end too
group.give_back("g5")       # the first call gives all back; waits for this one
group.close()
"""

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Protocol, TypeVar

from configs.plans.rentals import StudyRental
from configs.targets.target import Target

_AT_ONCE = 8
_R = TypeVar("_R")


class RentingStopped(Exception):
    """Renting was ended because another target has no nodes, or because the run ends."""


class Rental(Protocol):
    """The nodes that a target rents (`tasks.providers.study_nodes.StudyNodes`)."""

    def up(self, agreed: bool) -> Target:
        """Rent them."""

    def give_back(self) -> None:
        """Give them back."""

    def keep(self) -> bool:
        """Leave them up for a later run where the target says so; False: it does not."""

    def story(self) -> StudyRental:
        """What became of them."""


class RentalGroup:
    """Rentals by target. A plain class: Prefect would walk through a dataclass.

    agreed: a person has seen the price. left_behind: what could not be given back, in words.
    """

    def __init__(self, rentals: Mapping[str, Rental] | None = None, agreed: bool = False) -> None:
        self.rentals = dict(rentals or {})
        self.left_behind: list[str] = []
        self._agreed = agreed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None
        self._renting: dict[str, Future[Target]] = {}
        self._ending: dict[str, Future[None]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def check(self) -> None:
        """Called by rentals while they wait. Raises RentingStopped when they are to end."""
        if self._stop.is_set():
            raise RentingStopped("renting was stopped")

    def begin(self, wanted: Collection[str]) -> list[str]:
        """Begin to rent these targets; returns all that are being rented. What is begun already goes on.

        Of the others nothing is rented, as where all is measured; what an earlier run left of them is given back.
        """
        for name in self.rentals:
            if name in wanted and name not in self._renting:
                self._renting[name] = self._submit(self._rent, name)
        return list(self._renting)

    def up(self, name: str) -> Target:
        """Wait for the nodes of a target. Raises the first error of any target, after this one's nodes are back."""
        if name not in self._renting:
            self.begin(self.rentals)
        try:
            return self._renting[name].result()
        except RentingStopped:
            if self._first_error is None:
                raise
            raise self._first_error from None

    def give_back(self, name: str) -> None:
        """Give all targets back, with the first call, and wait for this one. One that is back already is no error."""
        self._stop.set()
        with self._lock:
            again = name in self._ending and self._ending[name].done() and self._ending[name].exception() is not None
            for each in [name] if again else self.rentals.keys() - self._ending.keys():
                self._ending[each] = self._submit(self._end, each)
        self._ending[name].result()

    def keep(self, name: str) -> bool:
        """Leave the nodes of a target up where it says so and they are; False: they are to be given back."""
        renting = self._renting.get(name)
        return renting is not None and renting.done() and renting.exception() is None and self.rentals[name].keep()

    def close(self) -> None:
        """End the threads, which have nothing to do any more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def stories(self) -> tuple[StudyRental, ...]:
        """What became of each."""
        return tuple(rental.story() for rental in self.rentals.values())

    def _rent(self, name: str) -> Target:
        try:
            self.check()
            return self.rentals[name].up(self._agreed)
        except RentingStopped:
            raise
        except BaseException as error:
            with self._lock:
                self._first_error = self._first_error or error
            self._stop.set()
            raise

    def _end(self, name: str) -> None:
        renting = self._renting.get(name)
        if renting is not None and not renting.cancel():
            wait([renting])  # it gives back what it has made when it sees that it is to stop
        self.rentals[name].give_back()

    def _submit(self, work: Callable[[str], _R], name: str) -> "Future[_R]":
        """Threads are not daemons: a process that is told twice to end still gives its nodes back."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(_AT_ONCE, len(self.rentals)), "rentals")
        return self._threads.submit(copy_context().run, work, name)
