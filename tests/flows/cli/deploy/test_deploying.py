"""`rankwise deploy` and `rollout`: what they ask for, and what becomes of several deployments at once."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.common.base import WrongArgument
from configs.common.execution import Layout
from flows.cli.deploy import deploying
from flows.cli.deploy.deploying import DeployRequest, run_deploy, run_rollout
from flows.cli.main import app
from tasks.deployment import rollouts
from tasks.deployment.first_answers import Timing
from tasks.deployment.store import Store
from tasks.deployment.targets import parse_target
from tasks.models.hub import TransientFetchError
from tasks.providers.study_nodes import request_of
from tests.support.patience import patient


def test_a_rollout_keeps_what_is_not_named(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    now: Any = SimpleNamespace(
        model="m", max_sequences=8, max_length=4096, layout=Layout(tp=2), dtype="float32", identity="i", manifest="x",
        group_timeout_seconds=90.0,
    )  # fmt: skip
    asked: list[Any] = []

    def roll_out(store: Store, name: str, wanted: Any, *rest: Any) -> Any:
        asked.append(wanted)
        return SimpleNamespace(bundle="b", url="u", previous=("a",))

    monkeypatch.setattr(Store, "read", lambda *_: None)
    monkeypatch.setattr(Store, "bundle", lambda *_: now)
    monkeypatch.setattr(deploying, "roll_out", roll_out)
    for dtype in (None, "bfloat16"):
        assert run_rollout("one", "./m", "none", None, dtype, 0.01, 0.0, False) == 0
    first, second = asked
    assert (first.layout, first.max_length, first.max_sequences, first.dtype) == (Layout(tp=2), 4096, 8, "float32")
    assert second.dtype == "bfloat16" and first.group_timeout_seconds == second.group_timeout_seconds == 90.0


def test_an_interrupt_ends_deployments_to_several_targets(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    ended: list[str] = []

    class Slow:
        def __init__(self, store: Any, wanted: Any, say: Any, judge: Any, check: Callable[[], None]) -> None:
            self._name, self._check = wanted.name, check

        def deploy(self) -> Any:
            deadline = time.monotonic() + patient(30)
            while time.monotonic() < deadline:
                time.sleep(0.01)
                try:
                    self._check()
                except ValueError:
                    ended.append(self._name)
                    raise
            raise ValueError("nobody has ended it")

    monkeypatch.setattr(deploying, "Deploying", Slow)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(KeyboardInterrupt):
        run_deploy(DeployRequest(model="./m", targets=("local:cpu", "ssh:gpu-a"), verify=False))
    assert len(ended) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_rollout_and_a_change_of_the_number_of_servers(
    monkeypatch: pytest.MonkeyPatch, store: Store, number: int
) -> None:
    """Then they end what they have begun; a signal's own way would leave the new servers."""
    interrupted: list[bool] = []

    def work(*_: Any) -> Any:
        assert signal.getsignal(number) is not signal.SIG_DFL
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        except KeyboardInterrupt:
            interrupted.append(True)
            raise

    monkeypatch.setattr(Store, "read", lambda *_: None)
    now = SimpleNamespace(model="m", max_sequences=8, max_length=9, layout=Layout(), group_timeout_seconds=20.0)
    monkeypatch.setattr(Store, "bundle", lambda *_: now)
    monkeypatch.setattr(deploying, "roll_out", work)
    monkeypatch.setattr(rollouts, "set_server_count", work)
    before = signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored where nohup runs the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            run_rollout("one", "./m", "none", None, "float32", 0.01, 0.0, False)
        assert CliRunner().invoke(app, ["scale", "one", "--replicas", "2"]).exit_code == 1
    finally:
        signal.signal(number, before)
    assert interrupted == [True, True]


@pytest.mark.parametrize("field", ["hours", "max_loss", "max_usd_per_hour", "ready_seconds", "group_timeout_seconds"])
def test_nan_is_no_bound(field: str) -> None:
    with pytest.raises(WrongArgument, match="got nan"):
        run_deploy(DeployRequest(model="./m", targets=("local:cpu",), **{field: float("nan")}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/data/deployments"), "/data/deployments: Permission denied\n"),
        (TransientFetchError("the hub returned HTTP 503"), "the hub returned HTTP 503\n"),  # it ended the others
    ],
)
def test_what_keeps_one_of_several_targets_is_told_for_it(
    monkeypatch: pytest.MonkeyPatch, store: Store, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(deploying, "Deploying", lambda *_, **__: SimpleNamespace(deploy=refuse))
    assert run_deploy(DeployRequest(model="./m", targets=("local:cpu", "ssh:gpu-a"), verify=False)) == 1
    assert f"local:cpu: not deployed: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["deploy", "--target", "local:cpu"], ["rollout", "one"]])
def test_a_precision_beside_a_study_is_refused(words: list[str], tmp_path: Path) -> None:
    """The study's was deployed, and nothing said so."""
    done = CliRunner().invoke(app, [*words, "--from", str(tmp_path), "--dtype", "float32"])
    assert done.exit_code == 2
    assert done.stderr == "--dtype: has no effect with --from, which names the precision. Leave it out\n"


@pytest.mark.parametrize("target", ["ssh:gpu-a+gpu-b", "aws:g4dn.12xlarge"])
def test_a_study_s_layout_that_cannot_be_cut_over_the_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    """Two nodes were rented, and measured on, for a server of one rank."""
    monkeypatch.setattr(deploying, "_agreed", lambda *_: False)
    asked = DeployRequest(model=None, targets=(target,), nodes=2, sharded=True, from_run=tmp_path)

    def chosen(layout: Layout) -> None:
        monkeypatch.setattr(deploying, "wanted_of_run", lambda run, wanted: replace(wanted, model="m", layout=layout))

    for layout in (Layout(), Layout(tp=3), Layout(dp=2), Layout(dp=2, tp=2)):
        chosen(layout)
        with pytest.raises(WrongArgument, match=f"^--sharded: 2 nodes hold one replica .* chose {layout}. Leave out"):
            run_deploy(asked)
    for layout in (Layout(tp=2), Layout(tp=2, pp=3)):
        chosen(layout)
        assert run_deploy(asked) == 1, "refused by the person who was shown the price"


@pytest.mark.parametrize(
    ("target", "layout", "nodes", "refused"),
    [
        ("aws:g4dn.xlarge", Layout(dp=2), 1, "takes 2 GPUs of a node, but aws:g4dn.xlarge has 1 GPU. Use"),
        ("aws:g5.12xlarge", Layout(dp=2, tp=4), 1, "takes 8 GPUs of a node, but aws:g5.12xlarge has 4 GPUs. Use"),
        ("aws:g4dn.xlarge", Layout(tp=4), 2, "takes 2 GPUs of a node, but aws:g4dn.xlarge has 1 GPU. Use"),
        ("aws:g5.12xlarge", Layout(dp=2, tp=2), 1, None),
        ("aws:g5.12xlarge", Layout(tp=8), 2, None),
        ("aws:c7i.xlarge", Layout(dp=2), 1, None),
    ],
)
def test_a_study_s_layout_with_more_ranks_than_a_rented_node_has_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, layout: Layout, nodes: int, refused: str | None
) -> None:
    """The node was rented, and none of its ranks started."""
    monkeypatch.setattr(deploying, "_agreed", lambda *_: False)
    chosen = {"model": "m", "layout": layout, "dtype": "float32"}
    monkeypatch.setattr(deploying, "wanted_of_run", lambda run, wanted: replace(wanted, **chosen))
    asked = DeployRequest(model=None, targets=(target,), nodes=nodes, sharded=nodes > 1, from_run=tmp_path)
    if refused is None:
        assert run_deploy(asked) == 1, "refused by the person who was shown the price"
        return
    with pytest.raises(WrongArgument, match=f"^--from: the study chose {layout}, which {refused}"):
        run_deploy(asked)


@pytest.mark.parametrize("targets", [("local:cpu",), ("ssh:gpu-a",), ("local:cpu", "ssh:gpu-a+gpu-b")])
def test_machines_that_are_not_there_are_refused(targets: tuple[str, ...]) -> None:
    """`--nodes 3` of this machine deployed one server on it, and nothing said so."""
    with pytest.raises(WrongArgument, match=rf"^--nodes: got 3, but the machines are those of --target: {targets[0]}"):
        run_deploy(DeployRequest(model="./m", targets=targets, nodes=3))


def test_a_sharded_server_is_not_cut_over_machines_that_are_not_there() -> None:
    """`--sharded --nodes 2` of one host, or beside a rented target of two, started two ranks for each of its GPUs."""
    for target in ("ssh:gpu-a", "local:cpu", "ssh:gpu-a+gpu-b"):
        told = rf"^--nodes: got 3, but the machines are those of --target: {re.escape(target)}\. Name all"
        with pytest.raises(WrongArgument, match=told):
            run_deploy(DeployRequest(model="./m", targets=(target,), nodes=3, sharded=True))
    beside = DeployRequest(model="./m", targets=("ssh:a", "ssh:b+c", "local", "aws:g5.12xlarge"), nodes=3, sharded=True)
    cut = {text: deploying._wanted(beside, parse_target(text)).bundle.layout for text in beside.targets}
    assert cut == {"ssh:a": Layout(), "ssh:b+c": Layout(tp=2), "local": Layout(), "aws:g5.12xlarge": Layout(tp=12)}


def test_as_many_machines_as_are_named_are_not_refused(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(deploying, "_agreed", lambda *_: False)
    for targets in (("ssh:gpu-a+gpu-b",), ("aws:g4dn.xlarge",), ("local:cpu", "aws:g4dn.xlarge")):
        assert run_deploy(DeployRequest(model="./m", targets=targets, nodes=2, replicas=2)) == 1


def test_a_deployment_is_named_after_the_last_folder_of_its_model(tmp_path: Path) -> None:
    """A home folder of a directory service, /home/me@corp.com, gave its user's name to every deployment."""
    folder = tmp_path / "me@corp.com" / "models" / "llama@2"
    folder.mkdir(parents=True)
    names = {str(folder): "llama", f"{folder}/": "llama", "owner/m@fix/x": "m", "synthetic:llama-4m@0": "llama-4m"}
    assert {model: deploying._short_name(model) for model in names} == names


def test_rented_nodes_without_a_server_are_refused(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """The second node of `--nodes 2` was paid for and served nothing."""
    told = r"^--nodes: got 3 for 1 server; 2 nodes would be paid for and serve nothing\. Use --replicas 3, or --sharded"
    with pytest.raises(WrongArgument, match=told):
        run_deploy(DeployRequest(model="./m", targets=("aws:g4dn.xlarge",), nodes=3))
    monkeypatch.setattr(deploying, "_agreed", lambda *_: False)
    assert run_deploy(DeployRequest(model="./m", targets=("aws:g4dn.xlarge",), nodes=3, sharded=True)) == 1


def test_the_number_of_servers_is_named() -> None:
    """`rankwise scale NAME` alone ended all servers but one."""
    done = CliRunner().invoke(app, ["scale", "one"])
    assert done.exit_code == 2 and "--replicas" in done.stderr


def test_a_login_name_reaches_rented_nodes(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    asked: list[Any] = []

    def refuse(wanted: Any, yes: bool) -> bool:
        asked.extend(wanted)
        return False

    monkeypatch.setattr(deploying, "_agreed", refuse)
    assert run_deploy(DeployRequest(model="./m", targets=("aws:g4dn.xlarge", "ssh:gpu-a"), user="ada")) == 1
    assert [one.rented.user if one.rented else one.ssh.user for one in asked] == ["ada", "ada"]


@pytest.mark.parametrize(
    ("target", "field", "value"),
    [
        ("local:cpu", "user", "ada"),
        ("local:cpu", "max_usd_per_hour", 1.0),
        ("local:cpu", "python", "/opt/python"),
        ("ssh:gpu-a", "ssh_from", "203.0.113.7/32"),
        ("aws:g4dn.xlarge", "ssh_key", Path("id")),
        ("aws:g4dn.xlarge", "folder", "/data"),
        ("ssh:gpu-a", "regions", ("us-east-1",)),
        ("local:cpu", "network", "vpc-1"),
        ("ssh:gpu-a", "private", True),
    ],
)
def test_an_option_that_no_target_takes_is_refused(target: str, field: str, value: Any) -> None:
    option = "region" if field == "regions" else field.replace("_", "-")
    with pytest.raises(WrongArgument, match=f"--{option}: has no effect without a target of "):
        run_deploy(DeployRequest(model="./m", targets=(target,), **{field: value}))


def test_the_network_of_rented_nodes_is_that_of_the_command_line(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """An account without a default VPC could run studies, and deploy nothing."""
    asked: list[Any] = []
    monkeypatch.setattr(deploying, "_agreed", lambda wanted, yes: bool(asked.extend(wanted)))
    options = ["--network", "vpc-1", "--subnet", "subnet-2", "--profile", "serving", "--private"]
    command = ["deploy", "--model", "./m", "--target", "aws:g4dn.xlarge", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "--ssh-from: is needed with --private" in done.output and not asked
    CliRunner().invoke(app, [*command, "--ssh-from", "10.0.0.5/32"])
    request = request_of(asked[0].rented)
    assert (request.network, request.subnet, request.profile) == ("vpc-1", "subnet-2", "serving")
    assert not request.public_address and request.ssh_from == "10.0.0.5/32"


def test_a_port_is_of_one_target() -> None:
    with pytest.raises(WrongArgument, match="--port: got 8080 for several targets"):
        run_deploy(DeployRequest(model="./m", targets=("local:cpu", "ssh:gpu-a"), port=8080))


def test_what_a_field_cannot_be_is_told_in_one_line() -> None:
    with pytest.raises(WrongArgument) as caught:
        run_deploy(DeployRequest(model="./m", targets=("aws:g4dn.xlarge",), ssh_from="office"))
    assert str(caught.value).startswith("ssh_from: ") and "\n" not in str(caught.value)


def test_the_time_that_ranks_wait_and_the_models_name_reach_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve --name` is the model's name in requests on a rented instance too; there it named the deployment."""
    asked: list[Any] = []

    def refuse(wanted: Any, yes: bool) -> bool:
        asked.extend(wanted)
        return False

    monkeypatch.setattr(deploying, "_agreed", refuse)
    served = ["serve", "--model", "./m", "--provider", "aws", "--instance", "g4dn.xlarge", "--name", "Chat"]
    assert CliRunner().invoke(app, served).exit_code == 1
    deployed = ["deploy", "--model", "./m", "--target", "local:cpu", "--name", "one", "--group-timeout-seconds", "90"]
    assert CliRunner().invoke(app, deployed).exit_code == 1
    there, here = asked
    assert (there.name, there.bundle.name, there.bundle.group_timeout_seconds) == ("chat-aws-g4dn-xlarge", "Chat", 20.0)
    assert (here.name, here.bundle.name, here.bundle.group_timeout_seconds) == ("one", None, 90.0)


@pytest.mark.parametrize("target", ["aws:g4dn.xlarge", "gcp:n1-standard-4-t4", "aws:p3.2xlarge"])
def test_gpus_without_bfloat16_are_not_rented_for_it(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default was bfloat16 everywhere: the node was rented, and its ranks refused to start."""
    asked: list[Any] = []
    monkeypatch.setattr(deploying, "_agreed", lambda wanted, yes: asked.extend(wanted))
    assert run_deploy(DeployRequest(model="./m", targets=(target, "aws:g6.xlarge", "local:cpu"))) == 1
    provider, _, instance = target.partition(":")
    words = ["serve", "--model", "./m", "--provider", provider, "--instance", instance]
    assert CliRunner().invoke(app, words).exit_code == 1
    assert CliRunner().invoke(app, [*words, "--dtype", "float32"]).exit_code == 1
    assert [one.bundle.dtype for one in asked] == ["float16", "bfloat16", "bfloat16", "float16", "float32"]
    refused = r"^--dtype: got bfloat16, which NVIDIA \S+ .*does not multiply\. Use float16 or float32$"
    with pytest.raises(WrongArgument, match=refused):
        run_deploy(DeployRequest(model="./m", targets=(target,), dtype="bfloat16"))
    monkeypatch.setattr(deploying, "wanted_of_run", lambda run, wanted: replace(wanted, model="m", dtype="bfloat16"))
    with pytest.raises(WrongArgument, match=r"^--from: the study chose bfloat16, which "):
        run_deploy(DeployRequest(model=None, targets=(target,), from_run=tmp_path))


def test_a_million_tokens_that_cost_less_than_a_cent_are_not_free() -> None:
    fast = Timing(seconds=0.001, per_second=200_000.0, unit="tokens/s", requests=1)
    assert deploying._per_million(0.526, fast) == "0.00073" and deploying._per_million(None, fast) == ""


@pytest.mark.parametrize(
    ("seconds", "rate", "unit", "shown"),
    [
        (1.0823, 0.924, "embeddings/s", ("1,080", "0.924 embeddings/s")),
        (0.01234, 1296.6, "tokens/s", ("12.3", "1,300 tokens/s")),
    ],
)
def test_times_and_rates_have_three_digits(seconds: float, rate: float, unit: str, shown: tuple[str, str]) -> None:
    """The table had `1082.3` ms and `1 embeddings/s`, which may be 0.5 or 1.4."""
    assert deploying._timed(Timing(seconds=seconds, per_second=rate, unit=unit, requests=1)) == shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--targets", ""], "--targets: got nothing, expected a target, such as local:cpu"),
        (["--target", " , "], "--target: got nothing, expected a target, such as local:cpu"),
        (["--target", "local:cpu,ssh:a"], "--target: got local:cpu,ssh:a, expected one. Name several by --targets A,B"),
    ],
)
def test_targets_that_are_none_or_too_many_are_named_by_their_option(words: list[str], told: str) -> None:
    """An empty --targets, as of a shell variable that is not set, was `--target: got None`."""
    done = CliRunner().invoke(app, ["deploy", "--model", "m", *words])
    assert done.exit_code == 2 and done.output.strip() == told
