"""Own machines take the base, cheaper clouds come before dearer ones, peaks go to the next that has room."""

from configs.serving.deployment import RoutedServer
from engine.routing.choosing import BackendLoad, next_backend


def backend(name: str, price: float | None = None, draining: bool = False) -> RoutedServer:
    return RoutedServer(name=name, url="http://x", usd_per_hour=price, max_in_flight=2, draining=draining)


OWN, CHEAP, DEAR = backend("own"), backend("cheap", 0.5), backend("dear", 3.0)
ALL = (DEAR, CHEAP, OWN)


def chosen(tried: tuple[str, ...] = (), **in_flight: int | None) -> str | None:
    loads = {
        each.name: BackendLoad(
            ready=in_flight.get(each.name, 0) is not None, in_flight=in_flight.get(each.name, 0) or 0
        )
        for each in ALL
    }
    found = next_backend(ALL, loads, tried)
    return None if found is None else found.name


def test_the_base_is_own_and_the_peaks_go_on_by_price() -> None:
    assert chosen() == "own"
    assert chosen(own=1) == "own"
    assert chosen(own=2) == "cheap"
    assert chosen(own=2, cheap=2) == "dear"


def test_rented_nodes_of_unknown_price_come_after_those_of_a_known_one() -> None:
    """They were taken for own machines, and got the base."""
    unknown = RoutedServer(name="a-cloud", url="http://x", rented=True, max_in_flight=2)
    loads = {each.name: BackendLoad(ready=True) for each in (*ALL, unknown)}
    order = []
    while (found := next_backend((*ALL, unknown), loads, order)) is not None:
        order.append(found.name)
    assert order == ["own", "cheap", "dear", "a-cloud"]


def test_where_all_are_full_the_least_full_is_taken() -> None:
    assert chosen(own=4, cheap=3, dear=2) == "dear"
    assert chosen(own=2, cheap=3, dear=4) == "own"


def test_what_is_not_ready_tried_or_draining_is_passed_over() -> None:
    assert chosen(own=None) == "cheap"
    assert chosen(("own", "cheap")) == "dear"
    assert chosen(own=None, cheap=None, dear=None) is None
    ready = {"old": BackendLoad(ready=True), "new": BackendLoad(ready=True, in_flight=2)}
    found = next_backend((backend("old", draining=True), backend("new")), ready)
    assert found is not None and found.name == "new"
