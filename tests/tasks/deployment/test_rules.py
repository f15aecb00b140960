"""Rules of deploying by themselves: targets' names, the level that is chosen, first answers, what fits."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import POOLING, read_model_manifest
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.serving.deployment import FirstRequest, LevelCheck, OptimizationLevel, ServingBundle
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, SshTarget
from engine.planner.families import read_architecture
from tasks.deployment import bundles, first_answers, fit, level_checks
from tasks.deployment.bundles import WantedBundle, chosen_level, resolved_model, served_length, wanted_of_run
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.first_answers import TIES, _compare
from tasks.deployment.fit import check_fit, memory_of_rank
from tasks.deployment.fronts import tunnel_argv
from tasks.deployment.level_checks import _plan, check_levels
from tasks.deployment.store import Store
from tasks.deployment.targets import parse_target, ssh_host
from tests.support.run_folders.made_studies import (
    VOCABULARY,
    cells_of,
    planned,
    words,
    write_measurements,
    write_plan,
    write_record,
)
from tests.support.servers.hub_server import HubServer, Repository


@pytest.mark.parametrize(
    ("text", "kind", "rest"),
    [
        ("local:cpu", "local", None),
        ("local", "local", None),
        ("ssh:gpu-a", "ssh", "gpu-a"),
        ("ssh:10.0.0.1:2200", "ssh", "10.0.0.1:2200"),
        ("aws:g4dn.xlarge", "aws", "g4dn.xlarge"),
        ("gcp:n1-standard-4-t4", "gcp", "n1-standard-4+t4"),
        ("azure:Standard_NC6s_v3", "azure", "Standard_NC6s_v3"),
    ],
)
def test_targets_are_parsed(text: str, kind: str, rest: str | None) -> None:
    found = parse_target(text)
    assert (found.kind, found.host or found.instance) == (kind, rest)
    assert found.device == ("cpu" if text == "local:cpu" else None)


@pytest.mark.parametrize("text", ["", "local:tpu", "ssh:", "nowhere:x", "slurm:", "aws:"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--target"):
        parse_target(text)


def test_an_ssh_host_may_name_its_port() -> None:
    assert (ssh_host("10.0.0.1:2200").host, ssh_host("10.0.0.1:2200").port) == ("10.0.0.1", 2200)
    assert (ssh_host("gpu-a").host, ssh_host("gpu-a").port) == ("gpu-a", None)
    assert (ssh_host("2001:db8::5").host, ssh_host("2001:db8::5").port) == ("2001:db8::5", None)
    assert (ssh_host("[2001:db8::5]:2200").host, ssh_host("[2001:db8::5]:2200").port) == ("2001:db8::5", 2200)


def checks(**refused: str | None) -> dict[OptimizationLevel, LevelCheck]:
    levels: tuple[OptimizationLevel, ...] = ("none", "balanced", "aggressive")
    return {level: LevelCheck(level=level, passes=("int8",), refused=refused.get(level)) for level in levels}


def test_a_refused_level_falls_to_the_next_milder_one_and_says_so() -> None:
    said: list[str] = []
    assert chosen_level("aggressive", checks(), said.append) == "aggressive" and said == []
    assert chosen_level("aggressive", checks(aggressive="loses 3 %"), said.append) == "balanced"
    assert said == ["aggressive (int8) is not deployed: loses 3 %", "balanced is deployed in its place: "]
    said.clear()
    bad = checks(aggressive="loses 3 %", balanced="loses 2 %")
    assert chosen_level("aggressive", bad, said.append) == "none"
    assert "the unchanged weights are deployed in its place" in said
    assert chosen_level("none", bad, said.append) == "none"


@pytest.mark.parametrize(
    ("ladder", "told", "limit"),
    [(True, "+3.20 % perplexity", "1.00 %"), (None, "a cosine distance of 0.0320", "0.0100")],
)
def test_a_loss_and_its_limit_are_told_in_one_unit(ladder: bool | None, told: str, limit: str) -> None:
    """`+3.20 % perplexity, more than 0.01` compared per cent with a share."""
    quality = SimpleNamespace(ladder=ladder, text=lambda: told)
    result = SimpleNamespace(completed=True, estimate=lambda _: None)
    row: Any = SimpleNamespace(
        result=result, loss=0.032, quality=quality, resolved="int8", size_bytes=None, speed=1.2, base=False
    )
    found = level_checks._check("balanced", row, 0.01)
    assert found.refused == f"{told}, more than {limit}"
    said: list[str] = []
    assert chosen_level("balanced", checks() | {"balanced": found}, said.append) == "none"
    assert said[0] == f"balanced (int8) is not deployed: {told}, more than {limit}"
    unmeasured = {"balanced": LevelCheck(level="balanced", refused="out of memory")}
    chosen_level("balanced", checks() | unmeasured, said.append)
    assert said[-2] == "balanced is not deployed: out of memory"


def test_tokens_are_compared_up_to_the_first_tie() -> None:
    request = FirstRequest(prompt=(1,), tokens=(5, 6, 7), gaps=(0.5, 0.001, 0.5))
    tie = TIES["bfloat16"]

    def answer(*tokens: int) -> dict[str, object]:
        return {"choices": [{"token_ids": list(tokens)}]}

    assert _compare(request, answer(5, 6, 7), tie) == (1, None)
    assert _compare(request, answer(5, 9, 9), tie) == (1, None)  # another token at a tie
    assert _compare(request, answer(4, 6, 7), tie)[1] == "token 0 of an answer differs: got 4, expected 5"
    assert (
        _compare(request, answer(5, 6), TIES["float32"])[1] == "token 2 of an answer differs: got nothing, expected 7"
    )


@pytest.mark.parametrize("text", ["<html>", "{}", '{"choices": []}', '{"choices": [{"text": "a"}]}', "[1]", "null"])
def test_what_is_no_answer_of_the_api_is_shown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Another program may have the port."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    client = httpx.Client(base_url="http://x", transport=transport)
    monkeypatch.setattr(first_answers, "_client", lambda url, key: client)
    bundle = ServingBundle(
        id="b", model="m", identity="i", manifest="x", kind="decoder", files={},
        first_requests=(FirstRequest(prompt=(1,), tokens=(5,), gaps=(0.5,)),),
    )  # fmt: skip
    assert first_answers.first_answers("http://x", None, bundle) == f"not an answer of the API: {text}"


def test_vectors_are_compared_by_their_direction() -> None:
    request = FirstRequest(prompt="x", vector=(1.0, 0.0))
    for found, right in (([0.9999, 0.001], True), ([0.9, 0.4], False), ([1.0], False)):
        problem = _compare(request, {"data": [{"embedding": found}]}, 0.0)[1]
        assert (problem is None) is right


def test_what_does_not_fit_is_refused_with_the_smallest_instance_that_would_do(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    architecture = read_architecture(config, "llama-7b")
    arguments = (architecture, Layout(), "bfloat16", 2048)
    where = "aws:g4dn.xlarge"
    memory = memory_of_rank("aws/g4dn.xlarge", 1)
    assert memory is not None
    with pytest.raises(ValueError, match=r"does not fit: needs about 1\d\.\d+ GiB .*--target aws:") as caught:
        check_fit(*arguments, memory, where, tmp_path, "aws", "aws/g4dn.xlarge")  # type: ignore[arg-type]
    assert "g4dn.xlarge. The smallest" not in str(caught.value)
    large = memory_of_rank("aws/g5.12xlarge", 1)
    told = check_fit(*arguments, large, "aws:g5.12xlarge", tmp_path, "aws", "aws/g5.12xlarge")  # type: ignore[arg-type]
    assert "needs about" in told


@pytest.mark.parametrize("folder", ["/keys", "/my keys", '/100 % "mine"', "/a\\b"])
def test_paths_of_a_tunnel_come_to_ssh_as_they_are(folder: str) -> None:
    """As OpenSSH itself reads its options."""
    if shutil.which("ssh") is None:
        pytest.skip("needs OpenSSH")
    target = SshTarget.model_validate(
        {"kind": "ssh", "name": "lab", "hosts": ["gpu-a"], "key": f"{folder}/id", "known_hosts": f"{folder}/hosts"}
    )
    argv = tunnel_argv(target, target.hosts[0], "planted", 8000)
    options = [word for number, word in enumerate(argv) if argv[number - 1] == "-o"]
    asked = ["ssh", "-F", "none", "-G", *(part for option in options for part in ("-o", option)), "gpu-a"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    read = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert read["identityfile"].replace("%%", "%") == f"{folder}/id"
    assert read["userknownhostsfile"].replace("%%", "%") == f"{folder}/hosts"


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("positions", "wanted", "served"),
    [(8192, None, 2048), (8192, 8192, 8192), (8192, 64, 64), (1024, None, 1024), (1024, 4096, 1024)],
)
def test_a_server_takes_texts_as_long_as_was_asked_for(positions: int, wanted: int | None, served: int) -> None:
    config = {**LLAMA, "max_position_embeddings": positions}
    assert served_length(read_architecture(config, "llama"), wanted) == served


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ({"model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 2}, 512),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2}, 1024),
    ],
    ids=["bert", "gpt2"],
)  # fmt: skip
def test_a_server_takes_no_longer_texts_than_the_model(config: dict[str, Any], served: int) -> None:
    """A limit that config.json leaves to its family was taken for 2048."""
    assert served_length(read_architecture({"vocab_size": 128, **config}, "model"), None) == served


@pytest.mark.parametrize(("wanted", "served"), [(None, 512), (900, 900)])
def test_a_model_whose_positions_are_distances_is_served_longer_texts(wanted: int | None, served: int) -> None:
    assert served_length(read_architecture(ARCHITECTURES["t5-1m"], "t5"), wanted) == served


@pytest.mark.parametrize(
    ("wanted", "checked"),
    [
        (None, 2048),
        (4096, 4096),
        (26, 26),
        (25, "--max-length 25: 25 tokens are too few for the requests with which a server is tested. It needs 26"),
        (16384, "--max-length 16384: ./llama has 8192 positions"),
    ],
)
def test_what_is_served_is_what_must_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: int | None, checked: int | str
) -> None:
    """A fit for 512 tokens said nothing of a server of 2048; a length that cannot be served is refused before."""
    lengths: list[int] = []

    def check(architecture: Any, layout: Any, dtype: Any, length: int, *rest: Any) -> str:
        lengths.append(length)
        return "fits"

    config = {**LLAMA, "max_position_embeddings": 8192}
    manifest = SimpleNamespace(config=config, identity="llama", folder="", files={})
    monkeypatch.setattr("tasks.models.model_cache.load_manifest", lambda _: manifest)
    monkeypatch.setattr("tasks.deployment.fit.check_fit", check)
    store = Store(data=tmp_path, rented=tmp_path / "rented", cache=tmp_path / "cache")
    bundle = WantedBundle(model="./llama", max_length=wanted)
    made = Deploying(store, WantedDeployment("one", parse_target("local:cpu"), bundle), print, None)
    if isinstance(checked, str):
        with pytest.raises(ValueError, match=re.escape(checked)):
            made._fit("manifest.json")
    else:
        assert made._fit("manifest.json") == "fits" and lengths == [checked]


@pytest.mark.parametrize(
    ("target", "nodes", "replicas", "sharded", "servers"),
    [
        ("aws:g5.xlarge", 1, 2, False, 2),
        ("aws:g5.xlarge", 2, 2, False, 1),
        ("aws:g5.xlarge", 2, 3, False, 2),
        ("aws:g5.xlarge", 2, 2, True, 2),
        ("aws:g5.12xlarge", 1, 4, False, 1),  # a GPU for each
        ("aws:g5.12xlarge", 1, 5, False, 2),
        ("local:cpu", 1, 3, False, 3),
    ],
)
def test_servers_of_one_machine_must_fit_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, nodes: int, replicas: int, sharded: bool, servers: int
) -> None:
    """Each was held against the whole memory: the node was rented, and the second server did not start."""
    config = {**LLAMA, "max_position_embeddings": 8192}
    manifest = SimpleNamespace(config=config, identity="llama", folder="", files={})
    monkeypatch.setattr("tasks.models.model_cache.load_manifest", lambda _: manifest)
    store = Store(data=tmp_path, rented=tmp_path / "rented", cache=tmp_path / "cache")
    rented = {"kind": "aws", "instance": target.removeprefix("aws:"), "regions": ["us-east-1"], "nodes": nodes}
    wanted = WantedDeployment(
        "one", parse_target(target), WantedBundle(model="./llama"), replicas=replicas, sharded=sharded,
        rented=None if target == "local:cpu" else RentedTarget.model_validate(rented),
    )  # fmt: skip
    told = Deploying(store, wanted, print, None)._fit("manifest.json")
    assert told.endswith(" GiB" if servers == 1 else f" GiB for each of {servers} servers")
    size = 1 << 60 if wanted.rented is None else 18 << 30  # of the 22 GiB that an A10G has
    monkeypatch.setattr(fit, "needed_bytes", lambda *_: size)
    if servers == 1:
        assert Deploying(store, wanted, print, None)._fit("manifest.json")
    else:
        with pytest.raises(ValueError, match=f"for each of {servers} servers as .*Use fewer --replicas, or more mach"):
            Deploying(store, wanted, print, None)._fit("manifest.json")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_server_that_is_not_sharded_has_the_memory_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sharded: bool
) -> None:
    """Of two machines with a server each, it was held against the memory of both: it did not start there."""
    config = {**LLAMA, "max_position_embeddings": 8192}
    manifest = SimpleNamespace(config=config, identity="llama", folder="", files={})
    monkeypatch.setattr("tasks.models.model_cache.load_manifest", lambda _: manifest)

    class Host:
        def __init__(self, *_: Any) -> None: ...
        def memory_bytes(self) -> int:
            return 32 << 30

        def gpu_memory_bytes(self) -> None: ...
        def gpu_count(self) -> int:
            return 0

    monkeypatch.setattr("tasks.deployment.deploying.SshPlace", Host)
    rented = {"kind": "aws", "instance": "c7i.4xlarge", "regions": ["us-east-1"], "nodes": 2}  # of 32 GiB
    bundle = WantedBundle(model="./llama", layout=Layout(tp=2))
    hosts = SshTarget.model_validate({"kind": "ssh", "hosts": ["a", "b"]})
    store = Store(data=tmp_path, rented=tmp_path / "rented", cache=tmp_path / "cache")
    for target, given in (
        ("aws:c7i.4xlarge", {"rented": RentedTarget.model_validate(rented)}),
        ("ssh:a+b", {"ssh": hosts}),
    ):
        wanted = WantedDeployment(
            "one", parse_target(target), bundle, replicas=1 if sharded else 2, sharded=sharded, **given
        )
        told = Deploying(store, wanted, print, None)._fit("manifest.json")
        assert f"{target} has {32 if sharded else 16}.00 GiB" in told


def test_an_encoder_has_no_ranks_that_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is refused before anything is rented, as `rankwise serve` refuses it."""
    bert = {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
        "hidden_act": "gelu", "type_vocab_size": 2,
    }  # fmt: skip
    manifest = SimpleNamespace(config=bert, identity="bert")
    monkeypatch.setattr("tasks.models.model_cache.load_manifest", lambda _: manifest)
    store = Store(data=tmp_path, rented=tmp_path / "rented", cache=tmp_path / "cache")
    bundle = WantedBundle(model="./bert", group_timeout_seconds=90.0)
    made = Deploying(store, WantedDeployment("one", parse_target("local:cpu"), bundle), print, None)
    with pytest.raises(ValueError, match=r"--group-timeout-seconds: \./bert is one of the encoders"):
        made._fit("manifest.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not implemented for llama models"),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not implemented; use one of: llama,"),
    ],
)
def test_a_model_that_no_server_here_loads_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """It was found on the rented node, to which its weights had been brought."""
    manifest = SimpleNamespace(config=LLAMA | changes, identity="llama", folder="", files={})
    monkeypatch.setattr("tasks.models.model_cache.load_manifest", lambda _: manifest)
    store = Store(data=tmp_path, rented=tmp_path / "rented", cache=tmp_path / "cache")
    made = Deploying(
        store, WantedDeployment("one", parse_target("local:cpu"), WantedBundle(model="./llama")), print, None
    )
    with pytest.raises(ValueError, match=message):
        made._fit("manifest.json")


@pytest.mark.parametrize("source", ["hub", "folder"])
def test_a_model_too_large_for_the_target_is_refused_before_its_weights_are_fetched_or_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (folder / "config.json").write_text(json.dumps(LLAMA | large))
    (folder / "model.safetensors").write_bytes(bytes(64))
    store = Store(data=tmp_path / "data", rented=tmp_path / "rented", cache=tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for module in ("sources", "model_cache"):
        monkeypatch.setattr(f"tasks.models.{module}.hashed_files", lambda *_: pytest.fail("all weights are read"))
    rented = RentedTarget.model_validate({"kind": "aws", "instance": "g5.xlarge", "regions": ["us-east-1"]})
    with HubServer({"acme/llama-70b": Repository(folder)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        bundle = WantedBundle(model="./llama-70b" if source == "folder" else "acme/llama-70b@main")
        wanted = WantedDeployment("one", parse_target("aws:g5.xlarge"), bundle, rented=rented)
        with pytest.raises(ValueError, match=r"--target aws:g5\.xlarge: the model does not fit: needs about"):
            Deploying(store, wanted, print, None).deploy()
        fetched = {request.path.rpartition("/")[2] for request in hub.requests if request.method == "GET"}
    assert fetched == ({"config.json", "main"} if source == "hub" else set())
    assert not store.folder("one").exists()


@pytest.mark.parametrize(("group_timeout", "seconds"), [(20.0, 120.0), (90.0, 540.0)])
def test_a_slow_server_has_time_for_its_first_answers(
    monkeypatch: pytest.MonkeyPatch, group_timeout: float, seconds: float
) -> None:
    limits: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={"choices": [{"token_ids": [5]}]})

    client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(first_answers, "_client", lambda url, key: client)
    bundle = ServingBundle(
        id="b", model="m", identity="i", manifest="x", kind="decoder", files={}, group_timeout_seconds=group_timeout,
        first_requests=(FirstRequest(prompt=(1,), tokens=(5,), gaps=(0.5,)),),
    )  # fmt: skip
    assert first_answers.first_answers("http://x", None, bundle) is None and limits == [seconds]


@pytest.mark.parametrize(("hosts", "nodes", "tp"), [(["a"], 1, 2), (["a", "b"], 2, 2), (["a", "b"], 2, 4)])
def test_levels_of_a_model_cut_over_the_gpus_of_a_host_are_measured(
    tmp_path: Path, hosts: list[str], nodes: int, tp: int
) -> None:
    """A host was taken to hold one rank: nodes with several GPUs were rented, and then the plan was refused."""
    model = resolved_model("synthetic:llama-1m@0", tmp_path / "cache", tmp_path)
    target = SshTarget.model_validate({"name": "there", "hosts": hosts})
    plan, _ = _plan(model, target, (), "float32", RunPaths(tmp_path / "run"), tp, nodes, 64, 20.0)
    assert {(cell.layout.tp, cell.nodes) for cell in plan.cells.values() if cell.engine == "rankwise"} == {(tp, nodes)}


def test_levels_of_an_encoder_pool_as_it_says(tmp_path: Path) -> None:
    """Each cell of a model that takes the first token's state was refused, as it asked for the mean."""
    model = resolved_model("synthetic:bert-1m@0", tmp_path / "cache", tmp_path)
    manifest = read_model_manifest(Path(model.manifest))
    run, target = RunPaths(tmp_path / "run"), LocalTarget(device="cpu")
    plans = [_plan(model, target, (), "float32", run, 1, 1, 64, 20.0)[0]]
    (Path(manifest.folder) / "1_Pooling").mkdir()
    (Path(manifest.folder) / POOLING).write_text('{"pooling_mode": "cls"}')
    plans.append(_plan(model, target, (), "float32", run, 1, 1, 64, 20.0)[0])
    found = [{cell.workload.model_dump()["pooling"] for cell in plan.cells.values()} for plan in plans]
    assert found == [{"mean"}, {"first"}]


@pytest.mark.parametrize(("group_timeout", "measured"), [(20.0, 60.0), (90.0, 90.0)])
def test_levels_are_measured_with_the_time_that_servers_have(
    tmp_path: Path, group_timeout: float, measured: float
) -> None:
    model = resolved_model("synthetic:llama-1m@0", tmp_path / "cache", tmp_path)
    run = RunPaths(tmp_path / "run")
    plan, _ = _plan(model, LocalTarget(device="cpu"), (), "float32", run, 1, 1, 64, group_timeout)
    assert plan.measuring.group_timeout_seconds == measured


@pytest.mark.parametrize(("share", "warned"), [(0.56, True), (0.02, False)])
def test_levels_without_a_pass_have_no_speed_up_and_a_busy_machine_is_said(
    share: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other work unchanged weights were said to be 0.57 times as fast as themselves, and that was all."""

    def measure(plan: Plan, run: RunPaths, *_: object) -> None:
        run.environments.mkdir(parents=True)
        run.environment("e1").write_text("{}")
        for seconds, cell in enumerate(plan.cells.values(), 1):
            kept = getattr(cell.workload, "answers", False)
            answers = words(0, prompts=cell.workload.num_prompts or 1) if kept else None  # type: ignore[union-attr]
            passes: dict[str, Any] = {"compression_passes": "none"} if cell.compression else {}
            passes |= {"answer_vocabulary": VOCABULARY} if kept else {}
            write_measurements(run, cell, seconds, answers, repeats=1, others_cpu_share=share, **passes)

    monkeypatch.setattr(level_checks, "_measure", measure)
    model = resolved_model("synthetic:llama-1m@0", tmp_path / "cache", tmp_path)
    said: list[str] = []
    target, folder = LocalTarget(device="cpu"), tmp_path / "run"
    checks, _ = check_levels(
        model, target, ["balanced"], "float32", folder, tmp_path / "cache", 0.01, said.append, max_length=64
    )
    assert checks["balanced"].throughput and checks["balanced"].passes == () and checks["balanced"].speed is None
    busy = [line for line in said if "Other processes took more than 10 % of the machine's CPU" in line]
    assert len(busy) == warned


def test_weights_that_only_a_study_had_are_not_replaced_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study of int8 alone recommends int8: the unchanged weights were deployed, and nothing said so."""
    monkeypatch.setattr(bundles, "as_written", lambda identity, manifest: identity)
    found = {}
    for passes in ("int8", "balanced", "none"):
        study = f"""
        workload: {{kind: generate, prompt_tokens: 10, new_tokens: 8}}
        experiments: {{batches: {{kind: sweep, over: {{compression: [{passes}], batch_size: [1, 2]}}}}}}
        """
        plan = planned(study, repeats=3)
        run = write_plan(tmp_path / passes, plan)
        for _, cell in cells_of(plan):
            write_measurements(run, cell, 1.0, repeats=3)
        found[passes] = run.folder
    assert wanted_of_run(found["none"], WantedBundle("")).level == "none"
    assert wanted_of_run(found["balanced"], WantedBundle("")).level == "balanced"
    with pytest.raises(ValueError, match=r"recommends `compression: int8`, which is no level.*--optimization$"):
        wanted_of_run(found["int8"], WantedBundle(""))
    assert wanted_of_run(found["int8"], WantedBundle("", level="balanced")).level == "balanced"


def test_what_a_study_recommends_for_training_is_not_served(tmp_path: Path) -> None:
    """Replicas of the untrained weights were deployed, as many as the study had trained on, with `strategy: fsdp`."""
    plan = planned(
        """
        workload: {kind: train, global_batch_size: 4, sequence_length: 32, steps: 3}
        targets: [{kind: local, max_ranks: 2}]
        experiments: {training: {kind: sweep, over: {layout: [{dp: 2, strategy: fsdp}]}}}
        """,
        repeats=3,
    )
    run = write_plan(tmp_path / "trained", plan)
    for _, cell in cells_of(plan):
        for repeat in range(3):
            samples = {f"{rank}/{column}": [0.1] * 3 for rank in range(2) for column in ("step_seconds", "loss")}
            write_record(run, cell, repeat, samples=samples, figures={"tokens_per_step": 128})
    with pytest.raises(ValueError, match=r"trained: the study recommends a way to train, none to serve\. See its"):
        wanted_of_run(run.folder, WantedBundle(""))


def test_bundles_of_two_targets_keep_their_own_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were one file: the table of a command had another target's speed, and `scale` another's answers."""
    found: dict[OptimizationLevel, LevelCheck] = {"none": LevelCheck(level="none")}
    monkeypatch.setattr(bundles, "check_levels", lambda *_, **__: (found, {"none": ()}))
    model = resolved_model("synthetic:llama-1m@0", tmp_path / "cache", tmp_path)
    hosts = [SshTarget.model_validate({"kind": "ssh", "name": f"ssh-{name}", "hosts": [name]}) for name in "aba"]
    targets = (LocalTarget(), LocalTarget(device="cpu"), *hosts)
    made = [
        bundles.make_bundle(
            WantedBundle(model="m"), model, target, tmp_path, tmp_path / "cache", None, "", lambda _: None
        ).id
        for target in targets
    ]
    assert len(set(made)) == 4 and made[2] == made[4]
