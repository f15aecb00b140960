import pytest
from pydantic import ValidationError

from configs.load.arrivals import ClosedLoop, PoissonArrivals
from configs.load.job import Caps, Contents, Endpoint, LoadJob
from configs.load.objectives import RequestObjectives
from configs.workloads.serve import ServeWorkload


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://host/proxy/v1", "https://host/proxy"),
    ],
)
def test_an_address_is_kept_without_the_version(url: str, expected: str) -> None:
    assert Endpoint(url=url, model="m").url == expected


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://h:99999",
        "http://user:pass@host",
        "http://h/?key=1",
        "http://h\r\nX: 1",
    ],
)
def test_other_addresses_are_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Endpoint(url=url, model="m")
    assert "pass@" not in caught.value.errors()[0]["msg"]
    assert "--" not in caught.value.errors()[0]["msg"]  # of a study and of a target, which have fields


def test_a_schedule_above_the_cap_is_refused() -> None:
    endpoint = Endpoint(url="http://h", model="m")
    with pytest.raises(ValidationError, match=r"8 requests/s, above the cap of 7"):
        LoadJob(
            endpoint=endpoint,
            arrivals=PoissonArrivals(rate=4),
            contents=Contents(turns=2),
            caps=Caps(max_rate=7),
            duration_seconds=1,
        )


def test_users_are_refused_under_a_cap_of_rate() -> None:
    """They send as fast as the server answers: the cap was accepted and did nothing."""
    with pytest.raises(ValidationError, match="users: their rate is the server's speed, and max_rate caps it at 5"):
        LoadJob(
            endpoint=Endpoint(url="http://h", model="m"),
            arrivals=ClosedLoop(users=8),
            caps=Caps(max_rate=5),
            duration_seconds=1,
        )


@pytest.mark.parametrize(("rate", "turns"), [(21.0, 19), (0.1, 11), (3.1, 3)])
def test_conversations_at_the_cap_itself_are_allowed(rate: float, turns: int) -> None:
    """Divided by the turns and multiplied again, the rate is above the cap by a rounding."""
    work = ServeWorkload(rate=rate, turns=turns)
    assert work.requests(Endpoint(url="http://h", model="m"), None, None, rate, None, 0).requested_rate != rate


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ValidationError, match="duration_seconds: expected"):
        LoadJob(endpoint=Endpoint(url="http://h", model="m"), arrivals=ClosedLoop(users=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fields": {"prompt": "x"}}, "fields: prompt is set by the generator"),
        ({"fields": {"n": 2}}, "fields: n: one answer to a request is measured"),
        ({"vocabulary": (9, 9)}, "expected a range of token ids"),
        ({"prompts": "p.jsonl", "shared_prefix_tokens": 5}, "random prompts only"),
        ({"new_tokens": {"distribution": "uniform", "low": 5, "high": 4}}, "more than high"),
        ({"new_tokens": {"distribution": "lognormal", "mean": 65, "max": 64}}, "mean: got 65, more than max"),
    ],
)
def test_contents_that_contradict_themselves_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Contents.model_validate(fields)


@pytest.mark.parametrize("fields", [{"n": 1}, {"n": None}, {"top_p": 0.9}])
def test_fields_that_leave_one_answer_to_a_request_are_taken(fields: dict[str, object]) -> None:
    assert Contents(fields=fields).fields == fields


def test_users_beyond_the_cap_of_requests_in_flight_are_refused() -> None:
    """The others would ask again without a pause, since nothing is sent."""
    fields = {"endpoint": Endpoint(url="http://host", model="m"), "duration_seconds": 1.0}
    with pytest.raises(ValueError, match="users: got 5,000, expected at most 4,096"):
        LoadJob(arrivals=ClosedLoop(users=5000), **fields)
    LoadJob(arrivals=ClosedLoop(users=4096), **fields)


@pytest.mark.parametrize(("users", "allowed"), [(4096, True), (4097, False)])
def test_a_study_asks_for_no_more_users_than_a_run_may_have(users: int, allowed: bool) -> None:
    if allowed:
        work = ServeWorkload(users=users)
        job = work.requests(Endpoint(url="http://host", model="m"), None, None, None, None, 0)
        assert job.arrivals == ClosedLoop(users=users)
    else:
        with pytest.raises(ValueError, match="less than or equal to 4096"):
            ServeWorkload(users=users)


@pytest.mark.parametrize("rate", [None, 6.0])
def test_a_search_begins_at_the_cap_of_its_target(rate: float | None) -> None:
    """The job of the requests that are compared had the study's rate, or 1, and was refused above the cap."""
    work = ServeWorkload(find="max_rate", objectives=RequestObjectives(ttft_seconds=1), rate=rate)
    assert work.requests(Endpoint(url="http://h", model="m"), None, None, 0.5, None, 0).requested_rate == 0.5
