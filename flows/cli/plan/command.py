"""The options of `rankwise plan`, `plan-check` and `forecast`; the work is done beside this module.

`--hardware cuda rocm cpu` accepts several kinds: the first is the option's value, the others arrive as positional
arguments, in the place of the study file.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.options import AsJson, RunFolder

_MOST_GPUS = 65_536  # as `configs.common.execution.Degree`, which starts too slowly for this

# Files and figures of the user's that a prediction starts from, or that it is written to.
BenchmarkStudy = Annotated[Path | None, typer.Option(metavar="FILE", help="write a study file that measures training")]
EarlierRuns = Annotated[
    str | None, typer.Option(metavar="GLOB", help="correct predictions with these runs; quote the pattern")
]
OwnCatalog = Annotated[
    Path | None, typer.Option("--catalog", metavar="FILE.yaml", help="user catalog of hardware and prices")
]
PlanAssignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="override a study field or a figure: h100-80gb.memory_bytes=84e9"),
]


def plan(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="STUDY.yaml", help="study file: predict every cell")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "--model-name", metavar="NAME", help="name from --list-models, or folder with a config.json"
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            "--model-family",
            metavar="FAMILY",
            help="task: text_generation, text2text, embedding, vision, audio",
        ),
    ] = None,
    mode: Annotated[Literal["training", "inference"], typer.Option(help="workload to plan")] = "training",
    gpus: Annotated[
        int | None, typer.Option("--gpus", "--gpu-count", metavar="N", help="devices", min=1, max=_MOST_GPUS)
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(metavar="B", help="training: sequences per GPU and step; inference: concurrent requests", min=1),
    ] = 1,
    distributed: Annotated[bool, typer.Option("--distributed", help="use the fewest GPUs that hold the model")] = False,
    max_memory_gb: Annotated[float | None, typer.Option(metavar="G", help="memory of a GPU in 10^9 bytes")] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND...", help="available hardware: cuda, rocm, cpu; default all of them"),
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(metavar="N", help="find the smallest number up to N", min=1, max=_MOST_GPUS)
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="NAME", help="accelerator or instance: h100-80gb, aws/p5.48xlarge")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(metavar="S", help="tokens per sequence or prompt", min=1)
    ] = None,
    new_tokens: Annotated[int, typer.Option(metavar="N", help="tokens to generate", min=1)] = 128,
    serve: Annotated[bool, typer.Option("--serve", help="search machines, layouts and batches for serving")] = False,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="serving: requests per second to carry; finds how many machines")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="inference engine: vllm, tensorrt-llm, sglang, transformers")
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="serving: longest time to the first token")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="serving: longest time per output token")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="use spot prices, for interruptible work")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="folder for launcher configurations, or FILE.json; for a study, a CSV file"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    list_models: Annotated[bool, typer.Option("--list-models", help="list the models known by name")] = False,
    guide: Annotated[bool, typer.Option("--guide", help="print GPUs, memory and speed-up by model size")] = False,
    benchmark_out: BenchmarkStudy = None,
    learn_from: EarlierRuns = None,
    own_catalog: OwnCatalog = None,
    assignments: PlanAssignments = None,
) -> None:
    """Predict which layouts fit, their speed and their cost, before anything is run."""
    from flows.cli.errors import WRONG_STUDY, guarded, plainly
    from flows.cli.plan.model import run_plan
    from flows.cli.plan.request import PlanRequest

    request = PlanRequest(
        words=tuple(words or ()), model=model, family=family, mode=mode, gpus=gpus, max_gpus=max_gpus,
        batch_size=batch_size, distributed=distributed, max_memory_gb=max_memory_gb, hardware=tuple(hardware or ()),
        accelerator=accelerator, sequence_length=sequence_length, new_tokens=new_tokens, serve=serve, rate=rate,
        engine=engine, ttft=ttft, tpot=tpot, spot=spot, output=output,
        as_json=as_json, list_models=list_models, guide=guide, benchmark_out=benchmark_out, learn_from=learn_from,
        own_catalog=own_catalog,
        assignments=tuple(assignments or ()),
    )  # fmt: skip
    subject = Path(words[0]) if words else Path(model or "plan")
    work = lambda: plainly(lambda: run_plan(request))  # noqa: E731
    raise typer.Exit(guarded(work, subject, context.obj["debug"], wrong_value=WRONG_STUDY))


def plan_check_command(
    context: typer.Context,
    predict: Annotated[Path, typer.Option(metavar="B.csv", help="rows to predict")],
    fit: Annotated[Path | None, typer.Option(metavar="A.csv", help="measured rows to calibrate with")] = None,
    column: Annotated[
        list[str], typer.Option(metavar="NAME=COLUMN", help="name of a column in your files, repeatable")
    ] = [],  # noqa: B006
    value: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="value of a column that your files lack, repeatable")
    ] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Predict the rows of a file of measurements and print the prediction errors."""
    from flows.cli.errors import guarded, plainly
    from flows.cli.plan.check import plan_check as check

    raise typer.Exit(
        guarded(lambda: plainly(lambda: check(predict, fit, as_json, column, value)), predict, context.obj["debug"])
    )


def forecast_command(
    context: typer.Context,
    folder: RunFolder,
    to: Annotated[int | None, typer.Option(metavar="N", help="maximum number of ranks, up to 4096")] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="machine with the interconnect: aws/p5.48xlarge")
    ] = None,
) -> None:
    """Forecast a run's scaling beyond the measured ranks, for a given interconnect."""
    from flows.cli.errors import guarded
    from flows.cli.plan.forecast import print_forecast

    work = lambda: print_forecast(folder, to, machine)  # noqa: E731
    raise typer.Exit(guarded(work, folder, context.obj["debug"]))
