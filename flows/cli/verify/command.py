"""`rankwise verify`: compare a model's answers in a layout with those of unmodified transformers.

    rankwise verify --model DIR --tp 2 --dtype bfloat16
    rankwise verify --model DIR --save-reference good.zip          # then, of another checkpoint:
    rankwise verify --model OTHER --reference good.zip
    rankwise verify --all-architectures --layout tp=2 --layout pp=2         # one table

Exit codes: 0 agrees, 4 a defect, 2 not supported (or a wrong argument), 3 no verdict because a run failed, 1 any other
error. Runs without Prefect and without a server.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from configs.common.execution import MAX_DEGREE
from flows.cli.options import Pp, Tp

if TYPE_CHECKING:
    from configs.common.execution import Layout

_SAVED = "save the reference answers here, for later runs without transformers"


def verify(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR|ID", help="folder, owner/name@revision, or synthetic:ARCHITECTURE@SEED; several give a table"
        ),
    ] = None,
    all_architectures: Annotated[
        bool, typer.Option("--all-architectures", help="verify a small synthetic model of every family")
    ] = False,
    layout: Annotated[
        list[str] | None, typer.Option(metavar="tp=2,pp=2", help="instead of --tp, --pp and --dp; several give a table")
    ] = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Annotated[int, typer.Option(min=1, max=MAX_DEGREE, help="replicas")] = 1,
    engine: Annotated[
        Literal["rankwise", "transformers", "deepspeed", "onnxruntime"], typer.Option(help="engine to verify")
    ] = "rankwise",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="16-bit types are also checked in float32")
    ] = "float32",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="one `prompt` or `tokens` per line; default: built-in prompts of mixed lengths"
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="number of prompts; default 20")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="tokens generated per prompt; default 32")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per batch; default 8")] = None,
    positions: Annotated[
        int | None, typer.Option(min=2, help="tokens of the longest sequence; default: the model's limit, up to 2048")
    ] = None,
    save_reference: Annotated[Path | None, typer.Option(metavar="FILE", help=_SAVED)] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="compare with this saved reference, on its prompts")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="keep the run folder here: records, logs, completions")
    ] = None,
) -> None:
    """Compare a model's answers in a layout with unmodified transformers; exit code 4 on a defect."""
    from configs.hardware.architectures import one_of_each_family
    from flows.cli.errors import guarded
    from flows.cli.verify.run import VerificationRequest, run_verify
    from flows.cli.verify.table import run_table
    from tasks.checks.verification_inputs import VerificationSpec

    models = [*(model or []), *(f"synthetic:{name}@0" for name in one_of_each_family() if all_architectures)]
    if not models:
        raise typer.BadParameter("expected a model or --all-architectures", param_hint="--model")
    layouts = _layouts(layout or (), (dp, tp, pp), all_architectures)
    asked = VerificationSpec(
        models[0], layouts[0], engine, dtype, prompts, num_prompts, new_tokens, batch_size, positions
    )
    debug = context.obj["debug"]
    if len(models) == len(layouts) == 1:
        request = VerificationRequest(asked, save_reference, reference, as_json, keep)
        raise typer.Exit(guarded(lambda: run_verify(request), Path(models[0]), debug))
    if save_reference is not None or reference is not None:
        raise typer.BadParameter("requires one model in one layout", param_hint="--save-reference, --reference")
    raise typer.Exit(guarded(lambda: run_table(models, layouts, asked, keep, as_json), Path(models[0]), debug))


def _layouts(written: Sequence[str], degrees: tuple[int, int, int], all_architectures: bool) -> "list[Layout]":
    """The layouts that are asked for. degrees: --dp, --tp and --pp."""
    from configs.common.execution import Layout
    from flows.cli.verify.table import LAYOUTS, layout_of

    if written and degrees != (1, 1, 1):
        raise typer.BadParameter("cannot be combined with --tp, --pp and --dp", param_hint="--layout")
    try:
        layouts = [layout_of(one) for one in written]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--layout") from error
    if layouts:
        return layouts
    dp, tp, pp = degrees
    return list(LAYOUTS) if all_architectures and degrees == (1, 1, 1) else [Layout(dp=dp, tp=tp, pp=pp)]
