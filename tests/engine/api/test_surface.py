"""The documented Python surface: real groups of ranks, lost ranks, batched collectives, split layers, checkpoints."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn import functional

import engine
from configs.families.config import ModelConfig
from engine.api.current_group import world_communicator
from engine.api.inference_benchmark import BenchmarkConfig, DistributedInferenceBenchmark
from engine.api.nccl import NCCLCommunicator
from engine.api.orchestrator import MultiGPUOrchestrator
from engine.api.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
    create_tensor_parallel_config,
)
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid
from engine.rank.devices import VisibleDevice, claim_device
from tests.support.rank_pool import RankPool

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave_the_pools_group(rank: int) -> None:
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two processes without a group."""
    with RankPool(2) as pool:
        pool.run(leave_the_pools_group)
        yield pool


# What the ranks run.


def in_group(rank: int, port: int, transport: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` within the group of an orchestrator. `transport` gloo: also where memory could be shared."""
    orchestrator = MultiGPUOrchestrator(rank, 2, backend="gloo", device="cpu", timeout_seconds=30)
    orchestrator.initialize(master_port=port)
    try:
        world = world_communicator()
        if transport == "gloo":
            world = open_communicators(Grid(1, 2, 1, rank), CPU, "gloo", 30, "gloo").world
        return function(orchestrator, world, *arguments)
    finally:
        orchestrator.cleanup()


def describe(rank: int, port: int, **options: Any) -> dict[str, Any]:
    orchestrator = MultiGPUOrchestrator(rank, 2, timeout_seconds=30, **options)
    orchestrator.initialize(master_addr="127.0.0.1", master_port=port)
    orchestrator.barrier()
    healthy = orchestrator.check_health()
    stats = orchestrator.get_performance_stats()
    said = {
        "rank": orchestrator.get_rank(),
        "size": orchestrator.get_world_size(),
        "device": str(orchestrator.get_device()),
        "master": orchestrator.is_master(),
        "healthy": healthy,
        "initialized": dist.is_initialized(),
        "stats": stats,
    }
    orchestrator.cleanup()
    orchestrator.cleanup()
    return said | {"left": not dist.is_initialized(), "after": orchestrator.check_health()}


def batch_of_sums(orchestrator: MultiGPUOrchestrator, world: Any) -> dict[str, Any]:
    communicator = NCCLCommunicator(world)
    events: list[str] = []
    world.listener = lambda event: events.append(event.operation)
    rank = communicator.rank
    tensors = [torch.full((size,), float(rank + size)) for size in (3, 5, 7)]
    tensors.append(torch.full((2, 4), rank + 1, dtype=torch.int64).t())
    sent = torch.full((4,), float(rank))
    with communicator.batch_operations() as batch:
        for tensor in tensors:
            batch.all_reduce(tensor)
        batch.broadcast(sent, source=1)
        gathered = [communicator.all_gather(torch.full((2, 3), 10.0 * rank + number)) for number in range(3)]
        before = (events.copy(), tensors[0].tolist())
    inside = events.copy()
    one_by_one = NCCLCommunicator(world)
    for size in (3, 5, 7):
        one_by_one.all_reduce(torch.ones(size))
    return {
        "before": before,
        "events": inside,
        "collectives": (communicator.collectives, one_by_one.collectives),
        "sums": [tensor.tolist() for tensor in tensors],
        "sent": sent.tolist(),
        "gathered": [tensor.tolist() for tensor in gathered],
        "transport": communicator.transport,
    }


def batches_that_fail(orchestrator: MultiGPUOrchestrator, world: Any) -> list[str]:
    communicator = NCCLCommunicator(world)
    said = []
    tensor = torch.ones(2)
    for wrong in ("nested", "twice", "own"):
        try:
            with communicator.batch_operations():
                communicator.all_reduce(tensor)
                if wrong == "nested":
                    with communicator.batch_operations():
                        pass
                elif wrong == "twice":
                    communicator.all_reduce(tensor)
                else:
                    raise KeyError("mine")
        except (ValueError, KeyError) as error:
            said.append(str(error))
    return [*said, str(tensor.tolist()), str(communicator.collectives)]


def large_batch(orchestrator: MultiGPUOrchestrator, world: Any) -> tuple[int, int]:
    communicator = NCCLCommunicator(world)
    communicator.bucket_bytes = 100
    with communicator.batch_operations():
        for size in (10, 10, 10, 200, 10):  # 40 bytes each, and one that is larger than a bucket
            communicator.all_reduce(torch.ones(size))
    return communicator.collectives, communicator.bucket_bytes


def tuned(orchestrator: MultiGPUOrchestrator, world: Any) -> tuple[dict[int, float], int]:
    communicator = NCCLCommunicator(world)
    rates = communicator.optimize_for_bandwidth()
    return rates, communicator.bucket_bytes


def whole_layer(output_size: int, input_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(output_size, input_size, generator=generator), torch.randn(output_size, generator=generator)


def split_layers(orchestrator: MultiGPUOrchestrator, world: Any) -> dict[str, Any]:
    rank = orchestrator.get_rank()
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    weight, bias = whole_layer(12, 8)
    config = TensorParallelConfig(world_size=2, rank=rank, device=CPU, input_size=8, output_size=12)
    gathered = ColumnParallelLinear(config)
    gathered.load(weight, bias)
    config.gather_output = False
    own = ColumnParallelLinear(config)
    own.load(weight, bias)
    row = RowParallelLinear(config)
    row.load(weight, bias)
    torch.manual_seed(3)
    drawn = ColumnParallelLinear(TensorParallelConfig(2, rank, CPU, 8, 12, bias=False))
    shape = create_tensor_parallel_config(2, rank, CPU, hidden_size=8, intermediate_size=12, num_attention_heads=4)
    up, down = ColumnParallelLinear(shape.up), RowParallelLinear(shape.down)
    up.load(weight)
    down.load(whole_layer(8, 12)[0])
    return {
        "gathered": gathered(x),
        "own": own(x),
        "row": row(x),
        "row_of_part": row(x[..., 4 * rank : 4 * rank + 4]),
        "drawn": drawn(x),
        "pair": down(torch.relu(up(x))),
    }


def other_size(orchestrator: MultiGPUOrchestrator, world: Any) -> str:
    try:
        ColumnParallelLinear(TensorParallelConfig(4, 0, CPU, 8, 12))
    except ValueError as error:
        return str(error)
    return ""


def load_part(rank: int, folder: str, **options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    loader = engine.DistributedCheckpointLoader(folder, rank=rank, world_size=2, **options)
    tensors = loader.load()
    assert loader.report is not None
    return tensors, loader.report.asked_bytes, loader.report.checkpoint_bytes


# The ways in.


def test_names_are_there_and_torch_is_not_loaded_for_them() -> None:
    code = "import sys, engine; assert 'torch' not in sys.modules; engine.barrier(); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "True\n"
    assert sorted(engine._HOMES) == sorted(engine.__all__)
    for name in engine.__all__:
        assert callable(getattr(engine, name)), name
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        _ = engine.NoSuchThing  # type: ignore[attr-defined]


# The orchestrator.


def test_one_rank_needs_no_group() -> None:
    orchestrator = MultiGPUOrchestrator(rank=0, world_size=1)
    assert not orchestrator.check_health() and not orchestrator.attempt_recovery()
    with pytest.raises(ValueError, match="call initialize"):
        orchestrator.barrier()
    orchestrator.initialize()
    orchestrator.barrier()
    assert orchestrator.check_health() and orchestrator.is_master() and not dist.is_initialized()
    assert orchestrator.attempt_recovery()
    stats = orchestrator.get_performance_stats()
    assert f"{stats['communication_time']['mean']:.3f}s {stats['uptime_seconds']:.0f}s" == "0.000s 0s"
    assert (stats["failure_count"], stats["recovery_count"], stats["transport"]) == (0, 1, "none")
    with pytest.raises(ValueError, match="initialized already"):
        orchestrator.initialize()
    orchestrator.cleanup()
    assert not orchestrator.check_health()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank: 2 is not one of world_size=2"),
        ({"rank": 0, "world_size": 0}, "rank: 0 is not one of world_size=0"),
        ({"rank": 0, "world_size": 1, "backend": "tcp"}, "backend: 'tcp' is not known; use one of: nccl, gloo, mpi"),
        ({"rank": 0, "world_size": 1, "device": "gpu7"}, "device: 'gpu7' is not a device of torch"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MultiGPUOrchestrator(**arguments)


def test_two_ranks_meet_and_tell_of_themselves(two: RankPool) -> None:
    for rank, said in enumerate(two.run(describe, free_port())):
        assert (said["rank"], said["size"], said["master"]) == (rank, 2, rank == 0)
        assert said["healthy"] and said["initialized"] and said["left"] and not said["after"]
        stats, times = said["stats"], said["stats"]["communication_time"]
        assert (stats["backend"], stats["requested_backend"]) in (("gloo", "nccl"), ("nccl", "nccl"))
        assert times["count"] == 3  # the barrier of initialize, ours, and the health check
        assert 0 < times["min"] <= times["mean"] <= times["max"] <= times["total"] < stats["uptime_seconds"] + 1
        assert stats["communication_bytes"] == 4 and stats["failure_count"] == 0


def without_monitoring(rank: int, port: int) -> dict[str, Any]:
    return describe(rank, port, device="cpu", backend="gloo", enable_monitoring=False)


def test_without_monitoring_nothing_is_counted(two: RankPool) -> None:
    for said in two.run(without_monitoring, free_port()):
        assert said["healthy"]
        assert said["stats"]["communication_time"] == {"count": 0, "total": 0, "mean": 0, "min": 0, "max": 0}


def test_ranks_that_do_not_come_are_named() -> None:
    first = MultiGPUOrchestrator(0, 3, device="cpu", timeout_seconds=0.3)
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 of 3 did not come to 127\.0\.0\.1:\d+ within 0\.3 s"):
        first.initialize(master_port=free_port())
    first.cleanup()
    later = MultiGPUOrchestrator(1, 2, device="cpu", timeout_seconds=0.3)
    with pytest.raises(TimeoutError, match=r"rank 0 did not answer at 127\.0\.0\.1:\d+ within 0\.3 s"):
        later.initialize(master_port=free_port())
    later.cleanup()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        orchestrator = MultiGPUOrchestrator(0, 2, device="cpu", timeout_seconds=1)
        with pytest.raises(ValueError, match=f"master_port: {port} cannot be used on this host"):
            orchestrator.initialize(master_port=port)


# Lost ranks.

_held: list[MultiGPUOrchestrator] = []


def join(rank: int, port: int) -> int:
    dist.destroy_process_group()
    _held.append(MultiGPUOrchestrator(rank, 4, device="cpu", timeout_seconds=20))
    _held[0].initialize(master_port=port)
    return os.getpid()


def freeze(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def join_two(rank: int, port: int) -> None:
    _held[:] = [MultiGPUOrchestrator(rank, 2, device="cpu", timeout_seconds=3)]
    _held[0].initialize(master_port=port)


def die(rank: int) -> None:
    os._exit(9)


def recover(rank: int) -> tuple[Any, ...]:
    held = _held[0]
    healthy = held.check_health()
    recovered = healthy or held.attempt_recovery()
    total = world_communicator().all_reduce(torch.tensor([10.0 ** held.get_rank()])).item() if recovered else None
    stats = held.get_performance_stats()
    return healthy, recovered, held.get_rank(), held.get_world_size(), total, stats["failure_count"]


def ask(pool: RankPool, ranks: tuple[int, ...], function: Callable[..., Any]) -> list[Any]:
    """What some of the ranks answer."""
    pipes = [pool._pipes[rank] for rank in ranks]
    for pipe in pipes:
        pipe.send((function, ()))
    answers = []
    for pipe in pipes:
        assert wait([pipe], 60), "no answer"
        fine, answer = pipe.recv()
        assert fine, answer
        answers.append(answer)
    return answers


def test_the_others_go_on_without_a_lost_rank_and_without_the_first_one() -> None:
    with RankPool(4) as pool:
        pool.run(join, free_port())
        pool._pipes[2].send((die, ()))
        pool._processes[2].join(20)
        assert ask(pool, (0, 1, 3), recover) == [(False, True, place, 3, 111.0, 1) for place in range(3)]
        # Rank 0 served the store in which they met.
        pool._pipes[0].send((die, ()))
        pool._processes[0].join(20)
        assert ask(pool, (1, 3), recover) == [(False, True, place, 2, 11.0, 2) for place in range(2)]
        assert ask(pool, (1, 3), recover) == [(True, True, place, 2, 11.0, 2) for place in range(2)]


def test_a_rank_that_hangs_is_left_behind_within_the_time_limits() -> None:
    with RankPool(2) as pool:
        pool.run(leave_the_pools_group)
        pool.run(join_two, free_port())
        pool._pipes[0].send((freeze, ()))
        began = time.monotonic()
        # Its store is silent too, so rank 1 meets in its own.
        assert ask(pool, (1,), recover) == [(False, True, 0, 1, 1.0, 1)]
        assert time.monotonic() - began < 30
        os.kill(pool._processes[0].pid or 0, signal.SIGCONT)


# Devices.

THREE = [VisibleDevice(0, "GPU-a", 10 << 30), VisibleDevice(1, "GPU-b", 30 << 30), VisibleDevice(2, "GPU-c", 20 << 30)]


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKWISE_LOCKS", str(tmp_path))
    return tmp_path


def test_idle_devices_are_taken_by_free_memory_and_by_one_run_each(locks: Path) -> None:
    code = (
        "import sys, tests.engine.api.test_surface as tests; from engine.rank.devices import claim_device; "
        "print(claim_device(None, tests.THREE).device, flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "cuda:1\n"
    mine = [claim_device(None, THREE) for _ in range(2)]
    assert [str(claim.device) for claim in mine] == ["cuda:2", "cuda:0"]
    with pytest.raises(ValueError, match=r"all 3 accelerators are taken by other runs; wait .* device='cuda:0'"):
        claim_device(None, THREE)
    other.kill()
    other.communicate()
    again = claim_device(None, THREE)
    assert str(again.device) == "cuda:1"
    for claim in (*mine, again):
        claim.release()
        claim.release()
    assert str(claim_device(None, THREE).device) == "cuda:1"


def test_a_named_device_is_given_and_marked(locks: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = claim_device("cuda:1", THREE)
    idle = claim_device(None, THREE)
    assert (str(named.device), str(idle.device)) == ("cuda:1", "cuda:2")
    assert str(claim_device("cuda:2", THREE).device) == "cuda:2"
    assert "cuda:2 is taken by another run and will be shared with it" in caplog.text
    with (locks / "rankwise-device-GPU-b.lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ValueError, match="device: cuda:5 is not here; there is: cuda:0, cuda:1, cuda:2"):
        claim_device("cuda:5", THREE)
    assert str(claim_device(None, []).device) == "cpu"


# Collectives.


@pytest.mark.parametrize("transport", ["as chosen", "gloo"])
def test_a_batch_is_few_collectives_with_the_same_results(two: RankPool, transport: str) -> None:
    for said in two.run(in_group, free_port(), transport, batch_of_sums):
        assert said["before"] == ([], said["before"][1]) and said["before"][1][0] in (3.0, 4.0)
        assert said["events"] == ["all_reduce", "all_reduce", "broadcast", "all_gather"]
        assert said["collectives"] == (4, 3)
        assert said["sums"] == [[2.0 * size + 1] * size for size in (3, 5, 7)] + [[[3, 3]] * 4]
        assert said["sent"] == [1.0] * 4
        assert said["gathered"] == [[[[number] * 3] * 2, [[10.0 + number] * 3] * 2] for number in range(3)]
        if transport == "gloo":
            assert said["transport"] == "gloo"


def test_batches_keep_to_their_size_and_refuse_what_has_no_meaning(two: RankPool) -> None:
    assert two.run(in_group, free_port(), "as chosen", large_batch) == [(4, 100)] * 2
    for nested, twice, own, tensor, collectives in two.run(in_group, free_port(), "as chosen", batches_that_fail):
        assert "a batch is open already" in nested and "waits in the batch already" in twice and own == "'mine'"
        assert (tensor, collectives) == ("[1.0, 1.0]", "0")


def test_the_size_of_batches_is_measured_and_agreed_on(two: RankPool) -> None:
    (rates, size), (other_rates, other_size) = two.run(in_group, free_port(), "as chosen", tuned)
    assert rates == other_rates and size == other_size
    assert rates[size] >= 0.9 * max(rates.values()) and all(
        rate < rates[size] for one, rate in rates.items() if one < size
    )
    alone = NCCLCommunicator()
    assert (alone.size, alone.transport, alone.optimize_for_bandwidth()) == (1, "none", {})
    assert alone.all_gather(torch.ones(3)).tolist() == [[1.0] * 3]
    with alone.batch_operations():
        found = [alone.all_gather(each) for each in (torch.ones(0), torch.ones(2), torch.ones(0))]
    assert [each.tolist() for each in found] == [[[]], [[1.0, 1.0]], [[]]]


# Layers.


def test_split_layers_compute_what_a_whole_one_does(two: RankPool) -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    weight, bias = whole_layer(12, 8)
    whole = functional.linear(x, weight, bias)
    torch.manual_seed(3)
    drawn = functional.linear(x, torch.empty(12, 8).normal_(0, 0.02))
    pair = functional.linear(torch.relu(functional.linear(x, weight)), whole_layer(8, 12)[0])
    for rank, got in enumerate(two.run(in_group, free_port(), "as chosen", split_layers)):
        torch.testing.assert_close(got["gathered"], whole)
        torch.testing.assert_close(got["own"], whole[..., 6 * rank : 6 * rank + 6])
        torch.testing.assert_close(got["row"], whole)
        torch.testing.assert_close(got["row_of_part"], whole)
        torch.testing.assert_close(got["drawn"], drawn)
        torch.testing.assert_close(got["pair"], pair)


def test_layers_ask_for_the_group_that_there_is(two: RankPool) -> None:
    for said in two.run(in_group, free_port(), "as chosen", other_size):
        assert re.match(r"world_size, rank: 4, 0 are not those of this process's group \(2, [01]\); initialize", said)
    layer = ColumnParallelLinear(TensorParallelConfig(1, 0, CPU, 4, 6, init_method="zeros"))
    assert layer(torch.ones(4)).tolist() == [0.0] * 6
    with pytest.raises(ValueError, match=r"shapes are \(6, 4\) and \(6,\) for the bias, not \(4, 6\)"):
        layer.load(torch.ones(4, 6), torch.ones(6))
    with pytest.raises(ValueError, match="made with bias=True"):
        layer.load(torch.ones(6, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank: 2 is not one of world_size=2"),
        ({"init_method": "magic"}, "init_method: 'magic' is not one of normal, xavier, kaiming, zeros"),
        ({"output_size": 0}, "input_size, output_size: 8, 0"),
    ],
)
def test_a_layers_config_is_checked(change: dict[str, Any], message: str) -> None:
    fields = {"world_size": 2, "rank": 0, "device": "cpu", "input_size": 8, "output_size": 12}
    assert TensorParallelConfig(**fields).device == CPU  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorParallelConfig(**(fields | change))


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="world_size: 5 does not divide output_size 12; use one of: 1, 2, 3, 4, 6, 12"):
        ColumnParallelLinear(TensorParallelConfig(5, 0, CPU, 8, 12))
    with pytest.raises(ValueError, match=r"3 ranks cannot share 16 attention heads .*; use one of: 1, 2, 4, 8, 16"):
        create_tensor_parallel_config(3, 0, CPU, 1024, 4096, 16)
    with pytest.raises(ValueError, match="num_attention_heads: 7 does not divide hidden_size 1024"):
        create_tensor_parallel_config(2, 0, CPU, 1024, 4096, 7)


def test_the_config_of_a_transformer_says_what_each_rank_has() -> None:
    config = create_tensor_parallel_config(
        world_size=4,
        rank=3,
        device=CPU,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=2,
    )
    assert isinstance(config, TensorParallelConfig)
    assert (config.heads, config.kv_heads, config.feed_forward) == (range(12, 16), range(1, 2), range(3072, 4096))
    assert (config.head_dim, config.query.output_size, config.down.input_size) == (64, 1024, 4096)
    assert not config.up.gather_output and not config.bias


# Checkpoints.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random numbers in two files with an index."""
    folder = tmp_path_factory.mktemp("model")
    generator = torch.Generator().manual_seed(0)
    shapes = ModelConfig.parse(CONFIG).tensor_shapes()
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    names = sorted(tensors)
    places = {name: f"model-{1 + (number > len(names) // 2)}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
def test_each_rank_loads_its_part(checkpoint: Path, mapped: bool, prefetch: bool) -> None:
    whole = load_file(checkpoint / "model-1.safetensors") | load_file(checkpoint / "model-2.safetensors")
    parts = [load_part(rank, str(checkpoint), use_memory_map=mapped, enable_prefetch=prefetch)[0] for rank in range(2)]
    for name, tensor in whole.items():
        found = [part[name] for part in parts]
        if tensor.dim() == 1:
            assert all(torch.equal(one, tensor) for one in found), name
        else:
            dimension = 1 if "o_proj" in name or "down_proj" in name else 0
            assert torch.equal(torch.cat(found, dimension), tensor), name
            assert found[0].shape == found[1].shape


def test_a_rank_asks_for_half_of_the_bytes(checkpoint: Path) -> None:
    _, asked, stored = load_part(1, str(checkpoint))
    assert 0.5 <= asked / stored <= 0.55


def test_a_loader_converts_and_refuses(checkpoint: Path, tmp_path: Path) -> None:
    loader = engine.DistributedCheckpointLoader(checkpoint, 0, 1)
    assert {tensor.dtype for tensor in loader.load(torch.float32).values()} == {torch.float32}
    with pytest.raises(ValueError, match=r"3 ranks cannot share 4 attention heads .*; use one of: 1, 2, 4"):
        engine.DistributedCheckpointLoader(checkpoint, 0, 3)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        engine.DistributedCheckpointLoader(tmp_path)
    with pytest.raises(ValueError, match="rank: 4 is not one of world_size=2"):
        engine.DistributedCheckpointLoader(checkpoint, 4, 2)


# The benchmark.

TINY = BenchmarkConfig(
    model_size="tiny",
    batch_size=2,
    seq_len=16,
    num_layers=2,
    num_attention_heads=4,
    hidden_size=64,
    intermediate_size=96,
    world_size=2,
    vocab_size=128,
    new_tokens=4,
    dtype="float32",
    min_seconds=0.0,
    repeats=1,
)


def changed(**changes: Any) -> BenchmarkConfig:
    return BenchmarkConfig(**{**TINY.__dict__, **changes})


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_the_benchmark_runs_the_engine() -> None:
    results = DistributedInferenceBenchmark(TINY).run_comprehensive_benchmark()
    assert results.speedup_factor == results.throughput / results.single_rank_throughput > 0
    assert 0 < results.ttft_p50 < results.latency_p50 <= results.latency_p99
    assert 0 < results.token_latency_p50 <= results.token_latency_p99
    assert results.requests == 2  # two passes of one batch
    assert results.environment["tensor_transport"] != "none" and results.environment["torch"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(world_size=3), "3 ranks cannot share 4 attention heads"),
        (
            changed(hidden_size=256, num_attention_heads=64, world_size=64),
            "world_size: 64 ranks (outnumber the|need an accelerator)",
        ),
        (changed(num_layers=100, hidden_size=1 << 17), "GB of memory are free; use a smaller shape"),
        (changed(repeats=0), "use at least 1, 1 and 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(config: BenchmarkConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedInferenceBenchmark(config)


def test_a_launch_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.inference_benchmark._check", lambda config: None)
    benchmark = DistributedInferenceBenchmark(changed(world_size=1, num_attention_heads=3))
    with pytest.raises(RuntimeError, match="rank 0 of 1: failed: "):
        benchmark.run_comprehensive_benchmark()


# The document.


@pytest.mark.nightly
def test_the_examples_of_the_document_run(checkpoint: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "python-api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 5
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = tmp_path / "two_ranks.py"
    for block in blocks:
        if block.startswith("# two_ranks.py\n"):
            script.write_text(block)
    alone = "\n".join(block for block in blocks if not block.startswith("# two_ranks.py\n"))
    alone = alone.replace("/models/llama", str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-c", alone], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(script)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: loss 0.5" in done.stdout and "gathered 2 tensors" in done.stdout
