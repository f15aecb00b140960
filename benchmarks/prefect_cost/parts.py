"""The parts of `benchmarks.prefect_cost.bench` that need a process of their own. Each prints one line of JSON at its
end.

    python -m benchmarks.prefect_cost.parts import             # seconds to import Prefect
    python -m benchmarks.prefect_cost.parts first-flow         # from nothing to a finished flow run
    python -m benchmarks.prefect_cost.parts cells SEED SIZES   # ways to do a cell in Prefect; SIZES is JSON
    python -m benchmarks.prefect_cost.parts seams COUNT        # single calls of the API
    python -m benchmarks.prefect_cost.parts without ARGUMENT...  # `rankwise ARGUMENT...` with no Prefect at all

All but the last use the API of `flows.server.local`. Prefect is imported inside functions, because it
reads its settings when imported, and `without` must never have it.
"""

import importlib.abc
import json
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Never, ParamSpec, TypeVar

import httpx
import psutil

from flows.server.local import lease_server, prefect_api
from flows.server.process import read_server
from flows.server.settings import apply_environment, data_folder, drain_prefect, prefect_environment

THREADS = 4
"""Of the task runner for submitted tasks; Prefect's own default is a thread for each task."""

_RECORDED_SECONDS = 180.0

Value = TypeVar("Value")
Parameters = ParamSpec("Parameters")
Samples = dict[str, list[float]]


def server_processes() -> list[psutil.Process]:
    """The local server, and what it started."""
    server = read_server(data_folder())
    assert server is not None, "the caller holds a lease"
    process = psutil.Process(server.pid)
    return [process, *process.children(recursive=True)]


def server_cpu_seconds() -> float:
    """CPU that the local server has used so far."""
    return sum(process.cpu_times().user + process.cpu_times().system for process in server_processes())


def ask(url: str, path: str, **body: Any) -> Any:
    """One POST to the API. Without Prefect's client, so that whoever asks need not import it."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.loads(answer.read())


def time_import() -> Samples:
    """Seconds for what nearly every module that uses Prefect imports."""
    apply_environment(prefect_environment("http://127.0.0.1:9/api", data_folder()))
    began = time.monotonic()
    import prefect

    alone = time.monotonic() - began
    _ = prefect.flow, prefect.task  # loaded on first use
    return {"import": [alone], "import_used": [time.monotonic() - began]}


def first_flow() -> Samples:
    """The moment, by the clock that all processes share, at which a first flow run has ended.

    As `rankwise run` does it: Prefect is imported while the server comes up.
    """
    with lease_server() as lease:
        apply_environment(lease.environment)
        from prefect import flow

        lease.wait_until_healthy()
        flow(name="nothing")(_do_nothing)(0)
        return {"finished": [time.monotonic()]}


def _do_nothing(number: int) -> int:
    return number


def time_cells(seed: int, sizes: dict[str, list[int]]) -> Samples:
    """Every way to do a cell once at each of its sizes, in random order, each in a flow run of its own.

    Seconds in the flow's body, of the whole flow call, from its return until the server has recorded
    every task run, and the server's CPU from the first to the last of these.
    """
    plan = [(way, count) for way, counts in sizes.items() for count in counts]
    random.Random(seed).shuffle(plan)
    samples: Samples = {}
    with prefect_api() as lease:
        batch = _batch_flow()
        for way in sizes:  # what is loaded or connected at first use is not a task's price
            batch(way, 1)
        for way, count in plan:
            cpu, began = server_cpu_seconds(), time.monotonic()
            body_seconds, flow_run_id = batch(way, count)
            ended = time.monotonic()
            drain_prefect(_RECORDED_SECONDS)
            _await_records(lease.url, flow_run_id, 0 if way == "plain" else count)
            figures = {
                "body": body_seconds,
                "flow": ended - began,
                "recorded": time.monotonic() - ended,
                "server_cpu": server_cpu_seconds() - cpu,
            }
            samples |= {f"cells/{way}/{count}/{name}": [value] for name, value in figures.items()}
    return samples


def _batch_flow() -> Callable[[str, int], tuple[float, str]]:
    """A flow that does `count` trivial cells in one of the ways. Returns seconds and its run's id."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.runtime import flow_run
    from prefect.task_runners import ThreadPoolTaskRunner

    cell = task(name="cell", cache_policy=NO_CACHE)(_do_nothing)
    subflow = flow(name="cell", validate_parameters=False)(_do_nothing)
    ways: dict[str, Callable[[int], object]] = {
        "plain": lambda count: [_do_nothing(number) for number in range(count)],
        "sequential": lambda count: [cell(number) for number in range(count)],
        "submitted": lambda count: [future.result() for future in [cell.submit(number) for number in range(count)]],
        "subflow": lambda count: [subflow(number) for number in range(count)],
    }

    @flow(name="batch", task_runner=ThreadPoolTaskRunner(max_workers=THREADS), validate_parameters=False)  # type: ignore[arg-type]
    def batch(way: str, count: int) -> tuple[float, str]:
        began = time.monotonic()
        ways[way](count)
        return time.monotonic() - began, str(flow_run.id)

    return batch


def _await_records(url: str, flow_run_id: str, count: int) -> None:
    """Return when the server knows that this many task runs of a flow run have completed."""
    runs = {"flow_runs": {"id": {"any_": [flow_run_id]}}, "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    deadline = time.monotonic() + _RECORDED_SECONDS
    while (known := ask(url, "/task_runs/count", **runs)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server has recorded {known} of {count} task runs after {_RECORDED_SECONDS:.0f} s")
        time.sleep(0.1)


def time_seams(count: int) -> Samples:
    """Seconds of single calls, `count` of each, in turn, inside a flow run."""
    with prefect_api():
        from prefect import flow
        from prefect.artifacts import create_markdown_artifact
        from prefect.client.orchestration import get_client
        from prefect.runtime import flow_run

        @flow(name="seams")
        def seams() -> Samples:
            assert flow_run.id is not None
            with get_client(sync_client=True) as client:
                calls: dict[str, Callable[[], object]] = {
                    "artifact": lambda: create_markdown_artifact("text", key="bench-prefect"),
                    "poll": lambda: client.read_flow_run(flow_run.id),
                }
                return _time_in_turn(calls, count)

        return seams()


def _time_in_turn(calls: dict[str, Callable[[], object]], count: int) -> Samples:
    samples: Samples = {f"seams/{name}": [] for name in calls}
    for turn in range(count + 1):
        for name, call in calls.items():
            began = time.monotonic()
            call()
            if turn:  # the first one connects
                samples[f"seams/{name}"].append(time.monotonic() - began)
    return samples


class _State(Generic[Value]):
    """What a flow returns in place of Prefect's state."""

    def __init__(self, value: Value) -> None:
        self._value = value

    def is_cancelled(self) -> bool:
        return False

    def result(self, raise_on_failure: bool = True) -> Value:
        return self._value


class _Inert:
    """Stands for everything else of Prefect: can be called, entered and asked for anything, and does nothing."""

    def __getattr__(self, name: str) -> "_Inert":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> "_Inert":
        return self

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _WithoutPrefect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives hollow modules for `prefect` and all below it.

    Tasks and flows are their plain functions. Whoever asks for a client, or for an artifact, is told at
    once that the API is away.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "prefect" else None

    def exec_module(self, module: ModuleType) -> None:
        nobody = SimpleNamespace(id=None, parameters={})
        own = {
            "flow": _plain,
            "Flow": _PlainFlow,
            "task": _plain,
            "State": _State,
            "flow_run": nobody,
            "get_client": _away,
        }
        module.__dict__.update(own, __getattr__=lambda name: self._invent(module.__name__, name))

    def _invent(self, module: str, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "FlowRunContext":
            return _NoFlowRun
        if module == "prefect.exceptions":
            return type(name, (Exception,), {})
        return _away if module == "prefect.artifacts" else _Inert()


class _NoFlowRun:
    """Stands for the context of a flow run, which is a class: annotations name it."""

    @staticmethod
    def get() -> None:
        """There is none."""


def _away(*_: object, **__: object) -> Never:
    raise httpx.ConnectError("there is no Prefect here")


def _plain(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    """`@flow` and `@task`, with or without arguments."""
    if function is None:
        return _plain

    def call(*arguments: Any, return_state: bool = False, **named: Any) -> Any:
        value = function(*arguments, **named)
        return _State(value) if return_state else value

    call.fn = function  # type: ignore[attr-defined]
    return call


class _PlainFlow(Generic[Parameters, Value]):
    """Stands for the class that flows of this project derive from."""

    def __init__(self, fn: Callable[..., Any], **_: object) -> None:
        self.fn = fn
        self._call = _plain(fn)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(*arguments, **named)


def without_prefect(arguments: list[str]) -> None:
    """The command line as shipped, its flow and tasks as plain functions, no API, nothing imported of Prefect."""
    assert "prefect" not in sys.modules
    sys.meta_path.insert(0, _WithoutPrefect())
    import flows.server.local
    from flows.cli.main import app

    def no_server() -> Never:
        raise flows.server.local.LocalServerError("there is no Prefect here")

    flows.server.local.lease_server = no_server
    app(arguments)


def main(arguments: list[str]) -> None:
    """Do one part."""
    part, *rest = arguments
    if part == "without":
        without_prefect(rest)
        return
    parts: dict[str, Callable[..., Samples]] = {
        "import": time_import,
        "first-flow": first_flow,
        "cells": lambda seed, sizes: time_cells(int(seed), json.loads(sizes)),
        "seams": lambda count: time_seams(int(count)),
    }
    print(json.dumps(parts[part](*rest)))


if __name__ == "__main__":
    main(sys.argv[1:])
