"""The options of `rankwise plan`; what they ask for is done in `flows.cli.plan`.

Several kinds of hardware follow one `--hardware`, as in `--hardware cuda rocm cpu`: the first is the option's, the
others arrive as plain arguments, where the study file stands otherwise.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer


def plan(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[STUDY.yaml]", help="predict every cell of this study")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="a name of --list-models, or a folder with a config.json")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(metavar="FAMILY", help="what it is for: text_generation, text2text, embedding, vision, audio"),
    ] = None,
    mode: Annotated[Literal["training", "inference"], typer.Option(help="what to plan")] = "training",
    gpus: Annotated[int | None, typer.Option(metavar="N", help="devices", min=1)] = None,
    batch_size: Annotated[
        int, typer.Option(metavar="B", help="training: sequences of a GPU in a step; inference: served at once", min=1)
    ] = 1,
    distributed: Annotated[bool, typer.Option("--distributed", help="on several GPUs, as few as hold it")] = False,
    max_memory_gb: Annotated[float | None, typer.Option(metavar="G", help="of a GPU, in 10^9 bytes")] = None,
    hardware: Annotated[
        list[str] | None, typer.Option(metavar="KIND...", help="what there is: cuda, rocm, cpu; default all")
    ] = None,
    max_gpus: Annotated[int | None, typer.Option(metavar="N", help="look for the fewest up to so many", min=1)] = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="NAME", help="plan for this: h100-80gb, or an instance as aws/p5.48xlarge")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(metavar="S", help="tokens of a sequence, or of a prompt", min=1)
    ] = None,
    new_tokens: Annotated[int, typer.Option(metavar="N", help="tokens to generate", min=1)] = 128,
    spot: Annotated[bool, typer.Option("--spot", help="spot prices, for work that may be interrupted")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", help="folder for the launchers' files; of a study, a CSV file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    list_models: Annotated[bool, typer.Option("--list-models", help="the models that are known by name")] = False,
    guide: Annotated[bool, typer.Option("--guide", help="model sizes: GPUs, memory and speed-up, computed")] = False,
    benchmark_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a study that measures the model's training")
    ] = None,
    learn_from: Annotated[
        str | None, typer.Option(metavar="GLOB", help="of a study: correct the prediction by these runs; quote it")
    ] = None,
    own_catalog: Annotated[
        Path | None, typer.Option("--catalog", metavar="FILE.yaml", help="your own hardware and prices")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a study's field, or a figure: h100-80gb.memory_bytes=84e9"),
    ] = None,
) -> None:
    """Predict what fits, how fast and at what price, before anything is run."""
    from flows.cli.errors import plainly
    from flows.cli.plan import Request
    from flows.cli.plan import plan as answer
    from flows.cli.run import WRONG_STUDY, guarded

    request = Request(
        words=tuple(words or ()), model=model, family=family, mode=mode, gpus=gpus, max_gpus=max_gpus,
        batch_size=batch_size, distributed=distributed, max_memory_gb=max_memory_gb, hardware=tuple(hardware or ()),
        accelerator=accelerator, sequence_length=sequence_length, new_tokens=new_tokens, spot=spot, output=output,
        as_json=as_json, list_models=list_models, guide=guide, benchmark_out=benchmark_out, learn_from=learn_from,
        own_catalog=own_catalog,
        assignments=tuple(assignments or ()),
    )  # fmt: skip
    subject = Path(words[0]) if words else Path(model or "plan")
    work = lambda: plainly(lambda: answer(request))  # noqa: E731
    raise typer.Exit(guarded(work, subject, context.obj["debug"], wrong_value=WRONG_STUDY))
