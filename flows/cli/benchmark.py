"""`rankwise benchmark`: models by batch sizes by nodes as studies, which are saved, run and joined in one report.

rankwise benchmark --models bert-base-uncased,t5-small --batch-sizes 1,2,4,8 --nodes local,aws-g4dn.xlarge
rankwise benchmark --models bert-base-uncased --config my_config.json
rankwise benchmark --models t5-base --hardware-filter "GPU:T4+, price<=1"

A study has one workload, so models of several kinds (encoders, encoder-decoders, decoders) make a study for each. The
study files, run folders and `benchmark_results_<study>.json` lie below --output.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.common.base import Frozen, write_atomically

if TYPE_CHECKING:
    from configs.spec.study import ModelSpec, StudySpec
    from configs.targets.target import Target
    from tasks.planning.benchmark_file import BenchmarkFile

_KINDS = {"encoder": "encode", "encoder_decoder": "seq2seq", "decoder": "generate"}
_BATCH_SIZES, _REPEATS = (1, 2, 4, 8), 3


class BenchmarkRequest(Frozen):
    """Arguments of the command line; None: from the file, else the default."""

    models: list[str]
    batch_sizes: list[int] | None = None
    nodes: list[str] | None = None
    config: Path | None = None
    hardware_filter: str | None = None
    repeats: int | None = None
    output: Path = Path("distributed_benchmarks")
    dry_run: bool = False
    yes: bool = False


def benchmark(
    context: typer.Context,
    models: Annotated[str, typer.Option(metavar="A,B", help="folder, owner/name@revision or synthetic:NAME@SEED")],
    batch_sizes: Annotated[str | None, typer.Option(metavar="1,2,4", help="[default: 1,2,4,8]")] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="A,B", help="local, ssh:HOST, aws-g4dn.xlarge, or ids of --config")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE.json", help="nodes and defaults")] = None,
    hardware_filter: Annotated[
        str | None, typer.Option(metavar="FILTER", help='the cheapest instance that fits: "GPU:T4+"')
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="measurements of each point  [default: 3]")] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="studies, runs and results")] = Path(
        "distributed_benchmarks"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="write the studies and measure nothing")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="rent nodes without asking for confirmation")] = False,
) -> None:
    """Measure models at several batch sizes on several nodes, and write one report."""
    from flows.cli.errors import guarded, plainly

    def work() -> int:
        from tasks.models.sources import TransientFetchError

        asked = BenchmarkRequest(
            models=_split(models, "--models"),
            batch_sizes=None if batch_sizes is None else _sizes(batch_sizes),
            nodes=None if nodes is None else _split(nodes, "--nodes"),
            config=config,
            hardware_filter=hardware_filter,
            repeats=repeats,
            output=output,
            dry_run=dry_run,
            yes=yes,
        )
        try:
            return run_benchmark(asked)
        except TransientFetchError as error:
            raise OSError(str(error)) from error

    raise typer.Exit(guarded(lambda: plainly(work), Path("benchmark"), context.obj["debug"], wrong_value=2))


def run_benchmark(asked: BenchmarkRequest) -> int:
    """Write the studies, run them and print where the report is. Returns the exit code of the worst."""
    from configs.spec.study import study_yaml
    from flows.cli.run import dry_run_study, run_study
    from tasks.planning.benchmark_file import BenchmarkFile, read_benchmark_file

    file = read_benchmark_file(asked.config) if asked.config else BenchmarkFile()
    studies = make_studies(asked, file)
    asked.output.mkdir(parents=True, exist_ok=True)
    codes, results = [], []
    for study in studies:
        path = asked.output / f"{study.study}.yaml"
        write_atomically(path, study_yaml(study))
        typer.echo(f"study {path}")
        if asked.dry_run:
            codes.append(dry_run_study(path, [], asked.output))
            continue
        codes.append(run_study(path, [], asked.output, False, False, calibrate=False, yes=asked.yes))
        results.append(_write_results(asked.output, study))
    for result in results:
        typer.echo(f"Results    {result}")
    return max(codes)


def _write_results(output: Path, study: "StudySpec") -> Path:
    """Write the answers of a run in a file that `rankwise report --results` takes."""
    from configs.plans.paths import RunPaths
    from reports.json_form import run_answers
    from reports.reading.devices import load_comparable

    path = output / f"benchmark_results_{study.study}.json"
    answers = run_answers(load_comparable(RunPaths((output / study.study).absolute())))
    data = {"run": study.study, "answers": answers.model_dump(mode="json")}
    write_atomically(path, json.dumps(data, indent=1) + "\n")
    return path


def make_studies(asked: BenchmarkRequest, file: "BenchmarkFile") -> "list[StudySpec]":
    """Return a study for each kind of model. Raises ValueError naming the option; TransientFetchError."""
    from configs.spec.study import parse_study
    from flows.folders import cache_folder
    from tasks.checks.verification import kind_of
    from tasks.models.model_cache import load_manifest
    from tasks.planning.study_models import planned_model

    targets = _targets(asked, file)
    defaults = file.benchmark_defaults
    base, stamp = Path.cwd(), time.strftime("%Y%m%d-%H%M%S")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for position, (written, spec) in enumerate(_named_apart(asked.models, base)):
        model = planned_model(spec, position, cache_folder(), base)
        kind = _KINDS.get(kind_of(load_manifest(Path(model.manifest))))
        if kind is None:
            raise ValueError(f"--models: {written}: an image model, but only text models are supported")
        local = (base / spec.id).is_dir()
        told = spec.model_dump(exclude_none=True) | ({"id": str((base / spec.id).resolve())} if local else {})
        kinds.setdefault(kind, []).append(told)
    measuring: dict[str, Any] = {"repeats": asked.repeats or defaults.repeats or _REPEATS}
    if defaults.timeout_seconds is not None:
        measuring["cell_timeout_seconds"] = defaults.timeout_seconds
    sizes = asked.batch_sizes or defaults.batch_sizes or list(_BATCH_SIZES)
    return [
        parse_study(
            {
                "study": f"benchmark-{kind}-{stamp}",
                "models": models,
                "workload": {"kind": kind},
                "targets": [target.model_dump(exclude_defaults=True) | {"kind": target.kind} for target in targets],
                "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": sizes}}},
                "measuring": measuring,
            }
        )
        for kind, models in kinds.items()
    ]


def _named_apart(models: Sequence[str], base: Path) -> "list[tuple[str, ModelSpec]]":
    """Return each model as written with its description, whose name is the whole of it where another ends alike.

    Raises ValueError for one that is named twice.
    """
    from tasks.planning.study_models import model_spec

    twice = next((written for written, times in Counter(models).items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"--models: {twice} is named twice. Leave one of the two out")
    found = {written: model_spec(written, base) for written in models}
    named = Counter(spec.name for spec in found.values())
    return [
        (written, spec if named[spec.name] == 1 else spec.model_copy(update={"name": _whole_name(written)}))
        for written, spec in found.items()
    ]


def _whole_name(written: str) -> str:
    return written.removeprefix("synthetic:").strip("./").replace("/", "-")


def _targets(asked: BenchmarkRequest, file: "BenchmarkFile") -> "list[Target]":
    """Return the nodes to measure on: those named, else the filter's cheapest, else those of the file."""
    named, regions = list(asked.nodes or []), dict[str, str | None]()
    if asked.hardware_filter is not None:
        name, region = _cheapest(asked.hardware_filter)
        named.append(name)
        regions[name] = region
    names = named or [node.id for node in file.nodes] or ["local"]
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(file.target(name, regions.get(name)))
        except ValueError as error:
            known = "".join(f", {node.id}" for node in file.nodes)
            raise ValueError(f"--nodes: {name}: {error}. Known: local{known}") from error
    return found


def _cheapest(written: str) -> tuple[str, str | None]:
    """Return the cheapest instance that fits a filter, and the region that this names. Raises ValueError: none does."""
    from configs.hardware.catalog import catalog
    from configs.hardware.hardware_filter import matching, parse_filter
    from flows.folders import cache_folder
    from reports.text import plural

    wanted = parse_filter(written)
    offers = matching(wanted, catalog(cache_folder()))
    if not offers:
        raise ValueError(f"--hardware-filter {written!r}: no instance of the catalog fits; see `rankwise list-nodes`")
    first = offers[0]
    price = first.machine.usd_per_hour
    if price is None:
        place = f" in {wanted.region}" if wanted.region else ""
        raise ValueError(
            f"--hardware-filter {written!r}: fits {plural(len(offers), 'instance')}, but no price of them is known"
            f"{place}, so that none is the cheapest. Name one by --nodes"
        )
    others = ", ".join(each.name for each in offers[1:4])
    typer.echo(f"{written}: {first.name} ({price:.3f} USD/h), the cheapest of {len(offers)}; next: {others or 'none'}")
    return first.name, wanted.region


def _split(written: str, option: str) -> list[str]:
    names = [name.strip() for name in written.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option}: got nothing, expected names separated by commas")
    return names


def _sizes(written: str) -> list[int]:
    names = _split(written, "--batch-sizes")
    if any(not name.isdecimal() or int(name) < 1 for name in names):
        raise ValueError(f"--batch-sizes: got {written!r}, expected whole numbers above 0, such as 1,2,4")
    return [int(name) for name in names]
