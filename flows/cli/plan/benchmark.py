"""`rankwise plan --model NAME --benchmark-out FILE`: write a study file that measures a model's training.

    rankwise plan --model bert-base-uncased --distributed --max-gpus 4 --benchmark-out bert.yaml
    rankwise validate bert.yaml; rankwise run bert.yaml

`--hardware cuda` or `rocm` writes a Slurm target with that many GPUs, or a local one where this machine has them;
without GPUs among the kinds, the ranks are this machine's. The file contains everything that this version can measure;
the rest is added as comments with the reasons.
`configs.spec.cell` validates each point, so a strategy moves from the comments into the study once a version supports
it. Refusals of the engine that depend on the model are predicted here from its architecture.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from configs.common.base import WrongArgument
from configs.common.execution import Layout, Strategy
from configs.common.files.reading import read_text
from configs.common.system.cores import usable_cores
from configs.common.system.memory import host_memory_total
from configs.hardware.architectures import ARCHITECTURES
from configs.spec.cell import Cell
from configs.spec.experiments import StrongScaling
from configs.spec.study import parse_study, study_yaml
from configs.workloads.train import TrainingTask, TrainWorkload
from flows.cli.options import write_output
from flows.cli.plan.request import PLANNED, PlanRequest

if TYPE_CHECKING:
    from engine.planner.accelerators import LocalAccelerator
    from engine.planner.architecture import Architecture

_DEFAULT_GPUS = 4
_SEQUENCE_LENGTH = 128
_TASKS: dict[str, TrainingTask] = {
    "decoder": "causal_lm",
    "encoder": "masked_lm",
    "encoder_decoder": "seq2seq",
    "vision": "image_classification",
}
"""Kind of a model -> its training task."""
_SPLIT = ("llama", "mistral", "qwen2")
"""Families that the engine trains with its own code and can therefore split by tensor parallelism."""
_MOST_PER_NODE = 8
"""GPUs of a node where the catalog has no instance for the model."""
_STATE_BYTES = 16
"""Training states of a parameter: float32 weight, gradient and both moments of AdamW."""


def write_benchmark(request: PlanRequest, hardware: Sequence[str], file: Path) -> int:
    """Write the study, print what was left as a comment, and return the exit code."""
    from engine.planner.accelerators import local_accelerators
    from engine.planner.catalog import find_model
    from flows.folders import cache_folder

    assert request.model is not None
    if request.mode != "training":
        raise ValueError("--benchmark-out: supports training only. Leave --mode out")
    architecture = find_model(request.model, cache_folder())
    here = LocalRanks(usable_cores(), local_accelerators(), host_memory_total())
    text, comments = benchmark(request, architecture, hardware, file.absolute().parent, here)
    if file.exists() and not (file.is_file() and read_text(file) == text):  # somebody has edited it since
        raise WrongArgument(f"--benchmark-out: {file}: exists already with other content. Choose another name")
    write_output(file, text)
    if request.as_json:
        left_out = [{"what": what, "reason": reason} for what, reason in comments]
        print(json.dumps({"written": str(file), "left_out": left_out}, indent=1))
        return PLANNED
    named = quote(str(file))
    print(f"{file}: written; `rankwise validate {named}`, then `rankwise run {named}`")
    for what, reason in comments:
        print(f"  comment only  {what}: {reason}")
    return PLANNED


@dataclass(frozen=True)
class LocalRanks:
    """What this machine has for ranks: accelerators, one for each rank, else cores; and the memory of its host."""

    cores: int
    accelerators: "tuple[LocalAccelerator, ...]"
    host_memory_bytes: int

    @property
    def ranks(self) -> int:
        """Ranks that it holds."""
        return len(self.accelerators) or self.cores

    def rank_bytes(self, ranks: int) -> int | None:
        """Memory for one of so many ranks: of its device, None where the driver does not say, or half its share of
        the host's."""
        return self.accelerators[0].memory_bytes if self.accelerators else self.host_memory_bytes // 2 // ranks


def benchmark(
    request: PlanRequest, architecture: "Architecture", hardware: Sequence[str], folder: Path, here: LocalRanks
) -> tuple[str, list[tuple[str, str]]]:
    """Return the file's text and its comments with reasons.

    hardware: kinds that the user named; none: this machine. here: what this machine has. Raises ValueError for a
    sequence length that the model cannot have.
    """
    from engine.planner.choice.lengths import length_of

    several = request.distributed or request.max_gpus is not None or request.gpus is not None
    asked = (request.max_gpus or request.gpus or _DEFAULT_GPUS) if several else 1
    on_cores = list(hardware) == ["cpu"] and bool(here.accelerators)
    here = replace(here, accelerators=()) if on_cores else here
    targets, comments = _targets(request, architecture, hardware, asked, here)
    most = asked if targets else min(asked, here.ranks)
    said = request.sequence_length
    wanted = _SEQUENCE_LENGTH if said is None else length_of(architecture, said)
    room = None if targets else here.rank_bytes(most)
    model, measured, remark = _measurable(request.model or "", architecture, folder, room)
    if remark:
        comments.append((f"model {architecture.name}", remark))
    length = min(wanted, measured.max_positions or wanted)
    if said is not None and length < said:
        comments.append((f"sequence length {said:,}", f"{measured.name} has {length:,} positions"))
    if asked > most:
        comments.append((f"ranks above {most}", f"this machine holds {most}; on a larger one set `to: {asked}`"))
    experiments = _experiments(request, measured, most)
    shared = request.batch_size * most
    for degree in _strong_points(shared, most)[1]:
        comments.append((f"strong scaling at {degree} ranks", f"a batch of {shared} is not divisible by {degree}"))
    if asked > 1:
        batch = request.batch_size * asked
        comments += _strategies(asked, batch)[1]
        found = (f"layout tp={asked}", _tensor_refusal(measured, asked, batch))
        other = (f"layout pp={asked}", _refusal(Layout(pp=asked), batch))
        comments += [(what, reason) for what, reason in (found, other) if reason is not None]
    name = architecture.name.replace("/", "-")
    study = parse_study(
        {
            # A report must not carry the name of a model that was not measured.
            "study": f"{name}-training" if remark is None else f"{name}-stand-in",
            "models": [{"id": model}],
            "workload": {
                "kind": "train", "task": _TASKS[measured.kind], "global_batch_size": request.batch_size * most,
                **({} if measured.kind == "vision" else {"sequence_length": length}),
            },
            **({"targets": targets or [{"kind": "local", "device": "cpu"}]} if targets or on_cores else {}),
            "experiments": experiments,
        }
    )  # fmt: skip
    return _text(study_yaml(study), architecture, comments), comments


def _experiments(request: PlanRequest, measured: "Architecture", most: int) -> dict[str, Any]:
    """Return the experiments on up to `most` ranks."""
    global_batch = request.batch_size * most
    experiments: dict[str, Any] = {
        "batch": {"kind": "sweep", "over": {"workload.global_batch_size": [global_batch * n for n in (1, 2, 4, 8)]}},
        "precision": {
            "kind": "optimization", "baseline": {"dtype": "float32"}, "variants": {"bfloat16": {"dtype": "bfloat16"}},
        },
    }  # fmt: skip
    if most == 1:
        return experiments
    points, left_out = _strong_points(global_batch, most)
    experiments["strong"] = {"kind": "strong", "grow": "dp"} | ({"points": points} if left_out else {"to": most})
    weak = {"workload.global_batch_size": request.batch_size}
    experiments["weak"] = {"kind": "weak", "grow": "dp", "to": most, "base": weak}
    variants: dict[str, dict[str, Any]] = {
        name: {"layout.strategy": name} for name in _strategies(most, global_batch)[0]
    }
    if _tensor_refusal(measured, most, global_batch) is None:
        variants[f"tp={most}"] = {"layout.dp": 1, "layout.tp": most, "layout.strategy": "none"}
    if variants:
        baseline = {"layout.dp": most, "layout.strategy": "ddp"}
        experiments["strategies"] = {"kind": "optimization", "baseline": baseline, "variants": variants}
    return experiments


def _strong_points(global_batch: int, most: int) -> tuple[list[int], list[int]]:
    """Return the degrees of strong scaling that share the batch equally, of 1, 2, 4 ... `most`, and the others."""
    degrees = StrongScaling(grow="dp", to=most).degrees
    shared = [degree for degree in degrees if global_batch % degree == 0]
    return shared, [degree for degree in degrees if degree not in shared]


def _targets(
    request: PlanRequest, architecture: "Architecture", hardware: Sequence[str], asked: int, here: LocalRanks
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return a target for each kind of GPU that was named, and comments; no target: ranks on this machine."""
    kinds = [kind for kind in hardware if kind != "cpu"]
    targets: list[dict[str, Any]] = []
    comments: list[tuple[str, str]] = []
    for kind in kinds:
        if sum(device.kind == kind for device in here.accelerators) >= asked:
            targets.append({"kind": "local", "name": kind})
            continue
        instance, each = _instance(request, architecture, kind, asked)
        target: dict[str, Any] = {
            "kind": "slurm", "name": kind, "nodes": asked // each, "ranks_per_node": each, "gpus_per_node": each,
        }  # fmt: skip
        targets.append(target | ({"machine": instance} if instance else {}))
        if instance is None:
            why = f"no instance of the catalog with {asked} devices is known to hold it; set `machine` of the target"
            comments.append((f"prediction on {kind}", why))
    if kinds and "cpu" in hardware:
        comments.append(("hardware cpu", "another number of ranks; write a second study with `--hardware cpu`"))
    return targets, comments


def _instance(request: PlanRequest, architecture: "Architecture", kind: str, asked: int) -> tuple[str | None, int]:
    """Return the cheapest instance of the catalog that holds the training, and its GPUs for each node."""
    from engine.planner.catalog import planned_family_of
    from engine.planner.choice.selector import HardwareSelector

    choice = HardwareSelector().select_hardware_for_task(
        request.family or planned_family_of(architecture), architecture, "training", request.batch_size,
        distributed=asked > 1, gpu_count=asked, available_hardware=(kind,),  # type: ignore[arg-type]  # checked by the command
        sequence_length=request.sequence_length,
    )  # fmt: skip
    found = next((option for option in choice["options"] if asked % option["nodes"] == 0), None)
    if found is None:
        return None, max(each for each in range(1, min(asked, _MOST_PER_NODE) + 1) if asked % each == 0)
    return str(found["instance"]), asked // int(found["nodes"])


def _measurable(
    name: str, architecture: "Architecture", folder: Path, room: int | None
) -> tuple[str, "Architecture", str | None]:
    """Return the id of a measurable model, its architecture, and why it is not the model itself.

    room: bytes for a rank's training states; None: unknown, the planner has chosen the machine.
    """
    from engine.planner.catalog import find_model, planned_family_of, repository_of

    if name.startswith("synthetic:"):
        return name, architecture, None
    trained = architecture.kind in _TASKS and planned_family_of(architecture) != "audio"
    if Path(name).is_dir() and trained:
        here = Path(name).absolute()
        place = f"./{here.relative_to(folder)}" if here.is_relative_to(folder) else str(here)
        return place, architecture, None
    known = {size: find_model(size) for size in ARCHITECTURES}
    alike = [size for size in known if known[size].model_type == architecture.model_type]
    needed = _STATE_BYTES * architecture.parameters
    if trained and (room is None or needed <= room) and (repository_of(name) or "/" in name or name in ARCHITECTURES):
        return name, architecture, None
    alike = alike or [size for size in known if known[size].kind == architecture.kind]
    alike = alike or [size for size in known if known[size].model_type == "llama"]
    nearest = min(alike, key=lambda size: abs(known[size].parameters - architecture.parameters))
    millions = f"{architecture.parameters / 1e6:,.0f} million parameters"
    if not trained:
        why = f"models of type {architecture.model_type} ({millions}) are not supported in training"
    elif room is not None and needed > room:
        why = f"training states of {millions} require {needed / 1e9:.1f} GB per rank, more than this machine has"
    else:
        why = f"{millions} without weights; pass its folder or its repository to measure the model itself"
    return f"synthetic:{nearest}@0", known[nearest], f"{why}; replaced by {nearest} with random weights"


def _strategies(ranks: int, global_batch: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the strategies beside DDP that this version measures, and the refused ones with their messages."""
    good, bad = [], []
    for strategy in get_args(Strategy):
        if strategy in ("none", "ddp"):
            continue
        reason = _refusal(Layout(dp=ranks, strategy=strategy), global_batch)
        if reason is None:
            good.append(strategy)
        else:
            bad.append((f"strategy {strategy}", reason))
    return good, bad


def _tensor_refusal(model: "Architecture", ranks: int, global_batch: int) -> str | None:
    """Return why tensor-parallel training on this many ranks is unsupported; None if it is supported."""
    if model.model_type not in _SPLIT:
        return f"layout.tp: not supported in training of {model.model_type}, only of {', '.join(_SPLIT)}"
    heads = (("query heads", model.heads), ("key and value heads", model.kv_heads))
    for what, count in heads:
        if count % ranks:
            return f"layout.tp: {count} {what} are not divisible by {ranks}. Use a divisor of {count}"
    return _refusal(Layout(tp=ranks), global_batch)


def _refusal(layout: Layout, global_batch: int) -> str | None:
    try:
        Cell(model="any", workload=TrainWorkload(global_batch_size=global_batch), layout=layout)
    except ValidationError as error:
        return str(error.errors()[0].get("ctx", {}).get("error", error.errors()[0]["msg"]))
    return None


def _text(study: str, architecture: "Architecture", comments: list[tuple[str, str]]) -> str:
    head = [f"# How {architecture.name} trains: batch size, precision and ranks.", "# rankwise run FILE"]
    if "kind: slurm" in study:
        head.append("# Needs a Slurm cluster. Set `partition` and `account` of the targets where it requires them.")
    head.append("")
    tail = ["", "# Not measured by this version:", *(f"#   {what}: {reason}" for what, reason in comments)]
    return "\n".join([*head, study.rstrip(), *(tail if comments else []), ""])
