"""`rankwise serve`: an OpenAI-compatible server of a model; `rankwise generate`: one answer, then nothing is left.

rankwise serve --model ./my-llama --tp 2 --port 8000
rankwise generate --model ./my-llama --tp 2 "Once upon a time"
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from configs.common.execution import MAX_DEGREE
from flows.cli.deploy.command import GroupTimeout
from flows.cli.options import Pp, Tp

if TYPE_CHECKING:
    from configs.common.execution import Compression

ModelOption = Annotated[
    str, typer.Option("--model", metavar="DIR|ID", help="folder, owner/name@revision, or synthetic:ARCHITECTURE@SEED")
]
ServedDtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="type of the weights")]
CompressionOption = Annotated[
    str | None, typer.Option("--compression", metavar="PASSES", help="passes over the weights: int8, prune_2_4+int8")
]
Device = Annotated[Literal["cpu"] | None, typer.Option(help="compute on CPUs even if there are GPUs")]
MaxLength = Annotated[
    int | None, typer.Option(min=2, help="tokens of a sequence, prompt and answer; default: the model's, up to 8192")
]

_OF_PROVIDER = frozenset({"instance", "hours", "ssh_from", "python", "yes"})
_ALSO_THERE = frozenset({"provider", "model", "name", "dtype", "max_length"})
"""Options that say something of a rented instance too; all others are of a server on this machine."""


def serve(
    context: typer.Context,
    model: ModelOption,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Annotated[int, typer.Option(min=1, max=MAX_DEGREE, help="replicas, behind one address")] = 1,
    dtype: ServedDtype = "bfloat16",
    compression: CompressionOption = None,
    device: Device = None,
    cores_per_rank: Annotated[
        int | None, typer.Option(min=1, help="cores of each rank; default: this machine's, shared out")
    ] = None,
    name: Annotated[str | None, typer.Option(help="the model's name in requests; default: its own")] = None,
    host: Annotated[str, typer.Option(help="address to listen on; other machines reach 0.0.0.0")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    max_length: MaxLength = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="sequences computed at once, in each replica")] = 32,
    max_step_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of a step; default: 128 on a CPU, 2048 on a GPU")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="requests that wait; a further one is answered 429")] = 256,
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0.001, help="key-value cache of each rank; default: what fits, as needed")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="share equal beginnings of prompts")] = True,
    group_timeout_seconds: GroupTimeout = 20.0,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="refuse to start if other requests could change an answer's bits")
    ] = False,
    no_token: Annotated[
        bool,
        typer.Option("--no-token", help="require no bearer token, although others reach the address or one is set"),
    ] = False,
    provider: Annotated[
        Literal["aws", "gcp", "azure"] | None, typer.Option(help="rent --instance and serve there, as `deploy` does")
    ] = None,
    instance: Annotated[str | None, typer.Option(help="with --provider: such as g4dn.xlarge")] = None,
    hours: Annotated[float, typer.Option(min=0.01, max=720, help="with --provider: lifetime")] = 8.0,
    ssh_from: Annotated[str | None, typer.Option(metavar="CIDR", help="with --provider: who may connect")] = None,
    python: Annotated[str | None, typer.Option(help="with --provider: interpreter that has the libraries")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="with --provider: rent without asking for confirmation")] = False,
) -> None:
    """Serve a model over OpenAI's API until Ctrl-C or SIGTERM."""
    from configs.common.execution import Layout
    from flows.cli.errors import guarded
    from flows.cli.serving.server import in_words, run_server
    from tasks.serving.settings import ServerRequest

    rents = provider is not None or instance is not None
    _refuse_others(context, rents)
    if rents:
        chosen = dtype if _is_given(context, "dtype") else None
        raise typer.Exit(
            _serve_in_cloud(
                context, model, name, (provider, instance), chosen, max_length, hours, ssh_from, python, yes
            )
        )
    asked = ServerRequest(
        model=model,
        layout=Layout(dp=dp, tp=tp, pp=pp),
        dtype=dtype,
        compression=_passes(compression),
        device=device,
        cores_per_rank=cores_per_rank,
        name=name,
        host=host,
        port=port,
        max_length=max_length,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        kv_cache_gib=kv_cache_gib,
        prefix_caching=prefix_caching,
        batch_invariant=batch_invariant,
        max_queue=max_queue,
        group_timeout_seconds=group_timeout_seconds,
    )
    work = lambda: in_words(lambda: run_server(asked, no_token))  # noqa: E731
    raise typer.Exit(guarded(work, Path(model), context.obj["debug"], wrong_value=2))


def _refuse_others(context: typer.Context, rents: bool) -> None:
    """Raises typer.BadParameter for a given option of the other kind of server, which it would have no effect on."""
    for name in context.params:
        if not _is_given(context, name):
            continue
        option = f"--{name.replace('_', '-')}"
        if rents and name not in _OF_PROVIDER | _ALSO_THERE:
            raise typer.BadParameter("not with --provider. `rankwise deploy` has more options", param_hint=option)
        if not rents and name in _OF_PROVIDER:
            raise typer.BadParameter("only with --provider and --instance", param_hint=option)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _serve_in_cloud(
    context: typer.Context,
    model: str,
    name: str | None,
    node: tuple[str | None, str | None],
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    max_length: int | None,
    hours: float,
    ssh_from: str | None,
    python: str | None,
    yes: bool,
) -> int:
    """Deploy without compression to a rented instance. Returns the exit code. dtype: None leaves it to `deploy`."""
    from flows.cli.deploy.deploying import DeployRequest, run_deploy
    from flows.cli.deploy.errors import with_user_errors
    from flows.cli.errors import guarded

    provider, instance = node

    def work() -> int:
        if provider is None or instance is None:
            raise ValueError("--provider, --instance: expected both, or neither")
        target = f"{provider}:{instance}"
        asked = DeployRequest(
            model=model, targets=(target,), served_name=name, dtype=dtype, max_length=max_length, hours=hours,
            ssh_from=ssh_from, python=python, verify=False, yes=yes,
        )  # fmt: skip
        return run_deploy(asked)

    return guarded(lambda: with_user_errors(work), Path(model), context.obj["debug"])


def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="prompts; an answer to each is printed")],
    model: ModelOption,
    tp: Tp = 1,
    pp: Pp = 1,
    dtype: ServedDtype = "bfloat16",
    compression: CompressionOption = None,
    device: Device = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens of an answer")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0: always the most likely token")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.000001, max=1, help="smallest set of tokens with this probability")] = 1,
    seed: Annotated[int | None, typer.Option(min=-(1 << 63), max=(1 << 63) - 1, help="of the random numbers")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends the answer; several are possible")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a user's message to a chat model")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, as the API answers")] = False,
    group_timeout_seconds: GroupTimeout = 20.0,
) -> None:
    """Load a model, split it, and print its answers."""
    from configs.common.execution import Layout
    from flows.cli.errors import guarded
    from flows.cli.serving.server import in_words, run_generate
    from tasks.serving.settings import ServerRequest

    fields = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or None}
    asked = ServerRequest(
        model=model,
        layout=Layout(tp=tp, pp=pp),
        dtype=dtype,
        compression=_passes(compression),
        device=device,
        port=0,
        max_sequences=1,  # prompts are answered one after another
        group_timeout_seconds=group_timeout_seconds,
    )
    work = lambda: in_words(lambda: run_generate(asked, prompts, fields, chat, as_json))  # noqa: E731
    raise typer.Exit(guarded(work, Path(model), context.obj["debug"], wrong_value=2))


def _passes(written: str | None) -> "tuple[Compression, ...]":
    """Return the passes of an option. Raises typer.BadParameter."""
    from pydantic import ValidationError

    from configs.common.files.reading import validation_text
    from configs.spec.cell import Cell
    from configs.workloads.generate import GenerateWorkload

    try:
        return Cell(workload=GenerateWorkload(), compression=written or ()).compression
    except ValidationError as error:
        raise typer.BadParameter(validation_text(error), param_hint="--compression") from error
