"""Commands of other projects' servers, comparisons of answers, and what a metrics page says."""

import socket
import threading
from contextlib import nullcontext
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.common.base import SCHEMA_VERSION
from configs.load.arrivals import PoissonArrivals
from configs.load.job import Caps, Contents, Endpoint, LoadJob
from configs.plans.model_manifest import ModelManifest
from configs.spec.cell import Cell
from configs.spec.engines import TEXT_ONLY, EngineEnvironment
from engine.planner import accelerators
from engine.planner.accelerators import LocalAccelerator
from engine.workloads.servers import probes, watching
from engine.workloads.servers.commands import Wanted, child_environment, command_of
from engine.workloads.servers.probes import Answered, answered, compared
from engine.workloads.servers.watching import read_metrics


def wanted(engine: str, given: EngineEnvironment, source: Any = "folder", **work: Any) -> Wanted:
    layout = work.pop("layout", {})
    prompts = {"prompts": "prompts.jsonl"} if engine in TEXT_ONLY else {}
    cell = Cell(
        model="m",
        engine=engine,  # type: ignore[arg-type]
        layout=layout,
        dtype="bfloat16",
        workload={"kind": "serve", "prompt_tokens": 100, "new_tokens": 28, **prompts, **work},  # type: ignore[arg-type]
    )
    manifest = ModelManifest(
        schema_version=SCHEMA_VERSION, identity="folder:abc", source=source, folder="/models/m", files={},
        config={"max_position_embeddings": 4096},
    )  # fmt: skip
    return Wanted(cell, manifest, given, 8123, (0, 1), on_gpus=False)


@pytest.fixture
def python(tmp_path: Path) -> EngineEnvironment:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    return EngineEnvironment(python=str(tmp_path / "bin" / "python"))


def test_a_cell_becomes_options_of_vllm(python: EngineEnvironment) -> None:
    options = {"enable_chunked_prefill": True, "block_size": 32, "async_scheduling": False}
    asked = wanted("vllm", python, layout={"tp": 2}, max_sequences=8, prefix_caching=False, engine_options=options)
    command = command_of(asked)
    text = " ".join(command.argv)
    assert "--model /models/m" in text and "--tensor-parallel-size 2" in text and "--dtype bfloat16" in text
    assert "--max-model-len 128" in text and "--max-num-seqs 8" in text and "--no-enable-prefix-caching" in text
    assert text.endswith("--enable-chunked-prefill --block-size 32 --no-async-scheduling")
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert command.environment["OMP_NUM_THREADS"] == "1"


def test_the_cache_of_vllm_on_a_cpu_is_as_large_as_asked_for(python: EngineEnvironment) -> None:
    """Its variable takes whole GiB: caches of 0.25, 0.5 and 1 GiB were the same one, measured three times."""
    sizes = [command_of(wanted("vllm", python, kv_cache_gib=size)).environment for size in (None, 1.0, 3.0)]
    assert [one["VLLM_CPU_KVCACHE_SPACE"] for one in sizes] == ["1", "1", "3"]
    with pytest.raises(NotImplementedError, match=r"kv_cache_gib is a whole number on a CPU, got 0\.25"):
        command_of(wanted("vllm", python, kv_cache_gib=0.25))
    on_gpus = replace(wanted("vllm", python, kv_cache_gib=0.25), on_gpus=True)
    assert "--kv-cache-memory-bytes 268435456" in " ".join(command_of(on_gpus).argv)


def test_sglang_is_told_that_it_runs_on_a_cpu_and_on_which_cores(python: EngineEnvironment) -> None:
    """Its documentation requires the variable beside the option; without the other it takes the whole machine."""
    command = command_of(wanted("sglang", python, layout={"tp": 2}))
    assert command.environment == {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    assert "--device cpu" in " ".join(command.argv)
    assert command_of(wanted("sglang", python)).environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in command_of(wanted("sglang", python, layout={"dp": 2})).environment
    on_gpus = command_of(replace(wanted("sglang", python), on_gpus=True))
    assert not on_gpus.environment and "cpu" not in on_gpus.argv


@pytest.mark.parametrize(
    ("given", "ranks", "devices"),
    [
        ({}, 1, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}),
        ({}, 2, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"CUDA_VISIBLE_DEVICES": "3,1,0"}, 2, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"}),
        ({"CUDA_VISIBLE_DEVICES": "2"}, 2, {}),  # it says itself what it lacks
    ],
)
def test_a_server_sees_the_gpus_of_its_cell_alone(
    python: EngineEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    ranks: int,
    devices: dict[str, str],
) -> None:
    """llama.cpp and transformers spread a model over all that they see: a cell of one rank was measured on eight."""
    gpus = [LocalAccelerator("H100", uuid=f"GPU-{number}", pci=f"0000:1{number}:00.0") for number in range(4)]
    monkeypatch.setattr(accelerators, "_from_nvml", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    llama = EngineEnvironment(program="/bin/llama-server", model="/models/m.gguf")
    # Of the others one cell cannot have several ranks.
    for engine, where in (("vllm", python), *((("transformers", python), ("llama.cpp", llama)) if ranks == 1 else ())):
        asked = replace(wanted(engine, where, layout={"tp": ranks}), on_gpus=True)
        assert command_of(asked).environment == devices, engine


def test_a_slice_of_a_gpu_is_named_by_its_uuid(python: EngineEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [LocalAccelerator("H100 MIG", uuid=f"MIG-{part}", is_slice=True) for part in range(3)]
    monkeypatch.setattr(accelerators, "_from_nvml", lambda: slices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = replace(wanted("vllm", python), on_gpus=True)
    assert command_of(asked).environment == {"CUDA_VISIBLE_DEVICES": "MIG-0"}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 512}, 512),
        ({"text_config": {"max_position_embeddings": 1024}}, 1024),
        ({"max_position_embeddings": 4096}, 2048),
        ({}, 2048),
    ],
    ids=str,
)
def test_a_server_holds_no_longer_sequences_than_its_model(
    config: dict[str, Any], length: int, python: EngineEnvironment
) -> None:
    """vLLM did not start for a GPT-2 whose prompts come from a file: 2,048 tokens are more than its 1,024."""
    asked = wanted("vllm", python, prompts="prompts.jsonl")
    manifest = asked.manifest.model_copy(update={"config": config})
    argv = command_of(replace(asked, manifest=manifest)).argv
    assert argv[argv.index("--max-model-len") + 1] == str(length)


def test_what_a_server_has_no_option_for_is_said(python: EngineEnvironment) -> None:
    command = command_of(wanted("transformers", python))
    assert command.about == ("max_sequences", "max_length") and not command.exact and command.name == "/models/m"
    assert command.argv[0].endswith("/bin/transformers")
    assert "kv_cache_gib" in command_of(wanted("sglang", python, kv_cache_gib=1.0)).about
    asked = {"prefix_caching": False, "batch_invariant": True}
    assert command_of(wanted("transformers", python, **asked)).about[2:] == ("prefix_caching", "batch_invariant")
    assert command_of(wanted("vllm", python, **asked)).about == ("batch_invariant",)


def test_llama_cpp_keeps_no_prompts_where_none_are_shared() -> None:
    given = EngineEnvironment(program="/opt/llama-server", model="m.gguf")
    commands = [command_of(wanted("llama.cpp", given, prefix_caching=shared)) for shared in (True, False)]
    assert ["--no-cache-prompt" in command.argv for command in commands] == [False, True]
    assert [command.about for command in commands] == [("dtype",), ("dtype",)]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers", "llama.cpp"])
def test_an_engine_that_is_not_installed_is_refused_by_name(engine: str) -> None:
    with pytest.raises(NotImplementedError, match=f"engine {engine}: not installed"):
        command_of(wanted(engine, EngineEnvironment()))


def test_random_weights_have_no_files_for_others(python: EngineEnvironment) -> None:
    with pytest.raises(NotImplementedError, match="reads files"):
        command_of(wanted("vllm", python, source="synthetic"))


def test_a_server_gets_nothing_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    found = child_environment({"OMP_NUM_THREADS": "2"})
    assert found["OMP_NUM_THREADS"] == "2" and found["HF_HUB_OFFLINE"] == "1"
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & found.keys()


def test_answers_are_compared_up_to_the_first_difference() -> None:
    alone = Answered([1, 2, 3, 4], [2.0, 1.0, 0.01, 3.0])
    assert compared(alone, alone)[:2] == (4.0, 4.0)
    assert compared(alone, Answered([1, 2, 9, 4], [])) == (4.0, 2.0, 0.01)
    assert compared(alone, Answered([1, 2], []))[1] == 2.0  # a shorter answer differs
    assert isnan(compared(Answered(["a"], []), Answered(["b"], []))[2])
    assert compared(alone, Answered([1, 2, 3, 4, 5], []))[1:] == (4.0, inf)  # a longer one too, and no tie explains it


def test_an_answer_is_read_with_what_it_tells() -> None:
    told = {"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5, "c": -1.5}, {"b": -0.1}]}
    found = answered({"choices": [{"text": "ab", "logprobs": told}]})
    assert found is not None and found.tokens == ["a", "b"] and found.gaps[0] == 1.0 and isnan(found.gaps[1])
    assert answered({"choices": [{"text": "ab", "logprobs": None}]}) == Answered(["a", "b"], [])
    tops = [{"token": "a", "logprob": -0.5}, {"token": "c", "logprob": -1.5}]
    chat = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": tops}]}  # llama.cpp's, of a completion
    assert answered({"choices": [{"text": "a", "logprobs": chat}]}) == Answered(["a"], [1.0])
    assert answered({"error": "no"}) is None and answered([]) is None
    assert answered({"choices": [{"text": "ab", "token_ids": [7, 8]}]}) == Answered([7, 8], [])


def test_metrics_are_summed_over_labels() -> None:
    name = b"vllm:num_requests_running"
    page = b'# HELP x\n%b{engine="0"} 3\n%b{engine="1"} 4\nplain 2.5\nbad{ x\n' % (name, name)
    found = read_metrics(page)
    assert found["vllm:num_requests_running"] == 7 and found["plain"] == 2.5
    assert read_metrics(b"\xff\xfe") == {} and nan not in found.values()


def test_a_timestamp_of_a_metric_is_not_its_value() -> None:
    page = b"""vllm:num_requests_running{engine="0 } 1"} 3 1395066363000\nplain 2 1395066363000
spaced  {a="b"}  7\nlone{a="b"}\n"""
    assert read_metrics(page) == {"vllm:num_requests_running": 3, "plain": 2, "spaced": 7}


@pytest.mark.parametrize(
    ("during", "at_the_end", "seconds"),
    [((150, 160), 170, 70), ((150, 3), 120, None), ((150, None), 20, None), ((None, None), 170, 70)],
)
def test_counters_of_a_server_that_was_started_again_are_unknown(
    monkeypatch: pytest.MonkeyPatch, during: tuple[float | None, ...], at_the_end: float, seconds: float | None
) -> None:
    """They begin at zero: a difference over the whole run would be negative, or any number."""
    seen, pages = threading.Event(), [100, *during]

    def fetched(*_: object) -> bytes:
        if not pages:
            seen.set()
            return page(at_the_end)
        return page(pages.pop(0))

    def page(value: float | None) -> bytes:
        return b"" if value is None else f"rankwise:compute_seconds_total {value}\n".encode()

    monkeypatch.setattr(watching, "fetched", fetched)
    monkeypatch.setattr(watching, "EVERY_SECONDS", 0.001)
    with watching.Watch("http://127.0.0.1:1", None, None) as watch:
        assert seen.wait(600)
    assert watch.figures()["compute_seconds"] == seconds


def test_a_server_that_is_too_slow_for_a_probe_is_told_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(url=f"http://127.0.0.1:{silent.getsockname()[1]}", model="m")
        job = LoadJob(endpoint=endpoint, arrivals=PoissonArrivals(rate=1), duration_seconds=1)
        with pytest.raises(RuntimeError, match=r"the server answers no request: no answer within 0\.2 s"):
            probes.Probes(job, 1, None, exact=False).alone()


@pytest.mark.parametrize(("cap", "count"), [(None, 8), (10_000, 8), (100, 2), (48, 1), (47, 0), (1, 0)])
def test_requests_that_are_compared_keep_to_the_cap_of_tokens(cap: int | None, count: int) -> None:
    """Sent alone and again they were counted nowhere: an endpoint was asked for more than its cap."""
    job = LoadJob(
        endpoint=Endpoint(url="http://127.0.0.1:1", model="m"), arrivals=PoissonArrivals(rate=1), duration_seconds=1,
        contents=Contents(prompt_tokens=8, new_tokens=4), caps=Caps(max_tokens=cap),
    )  # fmt: skip
    found = probes.Probes(job, 8, None, exact=False)
    assert found.asked_tokens == 2 * 12 * count and found.asked_tokens <= (cap or 1000) / 2
    with pytest.raises(RuntimeError, match="answers no request") if count else nullcontext():
        found.alone()
    assert len(found.alone_answers) == count


def test_many_requests_that_are_compared_keep_to_the_cap_of_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(probes, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 100.0))
    monkeypatch.setattr(probes, "posted", lambda *_: (200, {"choices": [{"text": "a"}]}))
    for count, pauses in ((30, [0.0] * 30), (31, [0.5 * number for number in range(31)])):
        job = LoadJob(
            endpoint=Endpoint(url="http://127.0.0.1:1", model="m"), arrivals=PoissonArrivals(rate=1),
            duration_seconds=1, caps=Caps(max_rate=2),
        )  # fmt: skip
        slept.clear()
        probes.Probes(job, count, None, exact=False).alone()
        assert slept == pytest.approx(pauses)


@pytest.mark.parametrize("data", [{}, "<html>", {"choices": [{"message": {"content": "a"}}]}], ids=str)
def test_an_answer_that_is_no_completion_is_told_as_one(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    """The server was said to give no answer."""
    monkeypatch.setattr(probes, "posted", lambda *_: (200, data))
    job = LoadJob(
        endpoint=Endpoint(url="http://127.0.0.1:1", model="m"), arrivals=PoissonArrivals(rate=1), duration_seconds=1
    )
    with pytest.raises(RuntimeError, match="HTTP 200, but not with the JSON of a completion"):
        probes.Probes(job, 2, None, exact=False).alone()
