"""`rankwise plan`: predict which layouts fit, their speed and their cost, before anything is run.

    rankwise plan --model opt-6.7b --gpus 8 --batch-size 4 --max-memory-gb 40        how to train it
    rankwise plan --model opt-6.7b --gpus 8 --accelerator h100-80gb --learn-from 'runs/*'
    rankwise plan --model llama-7b --mode inference --hardware cuda rocm             what to serve it on
    rankwise plan --serve --model llama-3-8b --accelerator h100-80gb --engine vllm --ttft 0.5 --tpot 0.05
    rankwise plan STUDY.yaml                                                         every cell of a study
    rankwise plan --list-models | --guide

Exit codes: 0 planned, 3 planned but nothing fits, 2 the arguments are wrong.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.common.base import write_atomically
from flows.cli.options import write_output
from flows.cli.plan.request import NOTHING_FITS, PLANNED, WRONG_ARGUMENTS, PlanRequest
from flows.cli.plan.text import print_plan

if TYPE_CHECKING:
    from engine.planner.architecture import Architecture
    from engine.planner.choice.selector import HardwareSelector

HARDWARE = ("cuda", "rocm", "cpu")
_MIN_RATE, _MAX_RATE = 1e-6, 10**9  # one request in 12 days; beyond, counts and prices have hundreds of digits
_EVERYWHERE = ("words", "as_json")
# Options of each form of the command. Any other option would have no effect and is therefore refused.
_HEEDED = {
    "a study": ("accelerator", "output", "learn_from", "own_catalog", "assignments"),
    "--list-models": ("list_models",),
    "--guide": ("guide", "accelerator"),
    "--serve": ("model", "mode", "gpus", "accelerator", "hardware", "sequence_length", "new_tokens", "serve", "rate",
                "engine", "ttft", "tpot", "spot", "own_catalog", "assignments"),
    "--engine": ("model", "mode", "gpus", "accelerator", "batch_size", "sequence_length", "new_tokens", "engine",
                 "spot", "own_catalog", "assignments"),
    "--benchmark-out": ("model", "family", "mode", "gpus", "max_gpus", "batch_size", "distributed", "hardware",
                        "sequence_length", "benchmark_out"),
}  # fmt: skip
_OPTIONS = {"as_json": "--json", "own_catalog": "--catalog", "assignments": "--set"}


def run_plan(request: PlanRequest) -> int:
    """Run the requested form of the command. Returns the exit code; raises ValueError for unsupported requests."""
    kinds, others = split_words(request.words, request.hardware)
    misplaced = _misplaced(request, others)
    if misplaced is not None:
        return _refused(misplaced)
    modes = [bool(others), request.list_models, request.guide, request.model is not None]
    if sum(modes) != 1 or len(others) > 1:
        return _refused("expected one of: STUDY.yaml, --model NAME, --list-models, --guide")
    wrong = [kind for kind in kinds if kind not in HARDWARE]
    if wrong:
        return _refused(_no_kind(wrong[0]))
    form = "a study" if others else "--list-models" if request.list_models else "--guide" if request.guide else None
    form = form or ("--benchmark-out" if request.benchmark_out is not None else None)
    if form is None and (request.serve or request.engine is not None):
        form = "--serve" if request.serve else "--engine"
    ignored = _ignored(request, form, kinds) or _without_engine(request)
    if ignored is not None:
        return _refused(ignored)
    if others:
        from flows.cli.plan.study import plan_study

        return plan_study(
            Path(others[0]), list(request.assignments), request.as_json, learn_from=request.learn_from,
            machine=request.accelerator, output=request.output, own=request.own_catalog,
        )  # fmt: skip
    if request.serve and (request.rate is not None or (request.accelerator is None and request.gpus is None)):
        from flows.cli.plan.serve_machines import plan_serving_machines

        return plan_serving_machines(request, kinds)
    if request.serve or request.engine is not None:
        from flows.cli.plan.serve import plan_service

        return plan_service(request)
    if request.list_models:
        from flows.cli.plan.lists import list_models

        return list_models(request.as_json)
    if request.guide:
        from flows.cli.plan.lists import show_guide

        return show_guide(request.accelerator, request.as_json)
    if request.benchmark_out is not None:
        from flows.cli.plan.benchmark import write_benchmark

        return write_benchmark(request, kinds, request.benchmark_out)
    return plan_model(request, kinds)


def _ignored(request: PlanRequest, form: str | None, kinds: Sequence[str]) -> str | None:
    """Return a message naming an option without effect; None if all have one."""
    given = [field.name for field in fields(request) if getattr(request, field.name) != field.default]
    given += ["hardware"] if kinds and "hardware" not in given else []
    if form is not None:
        for name in given:
            if name not in (*_EVERYWHERE, *_HEEDED[form]):
                option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
                return f"{option}: has no effect on {form}. Leave it out"
    if form is None and request.mode == "training" and "new_tokens" in given:
        return "--new-tokens: has no effect on training. Add --mode inference"
    if request.gpus is not None and request.max_gpus is not None:
        return "--gpus, --max-gpus: mutually exclusive. --gpus sets the number, --max-gpus its upper limit"
    return None


def _without_engine(request: PlanRequest) -> str | None:
    """Return a message for options of serving that have no effect or no possible value; None if there is none."""
    for name, unit in (("ttft", "seconds"), ("tpot", "seconds"), ("rate", "requests per second")):
        value = getattr(request, name)
        if value is not None and not request.serve:
            return f"--{name}: has no effect without --serve. Add --serve"
        if value is not None and not 0 < value < float("inf"):
            return f"--{name}: expected {unit} above 0, got {value}"
    if request.rate is not None and not _MIN_RATE <= request.rate <= _MAX_RATE:
        return f"--rate: expected {_MIN_RATE:g} to {_MAX_RATE:,} requests per second, got {request.rate:g}"
    if request.rate is not None and request.gpus is not None:
        return "--gpus, --rate: mutually exclusive. --rate finds the number of machines"
    if request.serve and request.hardware and (request.accelerator is not None or request.gpus is not None):
        return "--hardware: has no effect on --serve with a device. Leave it, or --accelerator and --gpus, out"
    if request.engine is not None and not request.serve and request.mode != "inference":
        return "--engine: has no effect on training. Add --mode inference or --serve"
    return None


def _no_kind(word: str) -> str:
    """Return a message for what is no kind of hardware, perhaps the name of an accelerator or an instance."""
    from configs.hardware.catalog import accelerator, instance

    message = f"--hardware {word}: use one or more of: {' '.join(HARDWARE)}"
    with suppress(ValueError):
        name = instance(word).name if "/" in word else accelerator(word).name
        return f"{message}. For this one: --accelerator {name}"
    return message


def _misplaced(request: PlanRequest, others: Sequence[str]) -> str | None:
    """Return a message for a word that is neither a study nor a kind of hardware; None if there is none."""
    from engine.planner.catalog import find_model
    from flows.folders import cache_folder

    missing = [word for word in others if not Path(word).exists()]
    stray = [word for word in missing if "." not in word]
    if request.hardware and stray:
        return _no_kind(stray[0])
    if request.model is not None or not missing:
        return None
    with suppress(ValueError):
        return f"{missing[0]}: no such study. For the model: --model {find_model(missing[0], cache_folder()).name}"
    return None


def split_words(words: Sequence[str], hardware: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split positional arguments into kinds of hardware and other words.

    An option takes one word; further kinds after `--hardware cuda` arrive as positional arguments and are distinguished
    from a study file by their names. Commas also separate kinds.
    """
    named = [kind for item in hardware for kind in item.replace(",", " ").split()]
    further = [word for word in words if all(part in HARDWARE for part in word.split(",") if part)]
    named += [kind for word in further for kind in word.split(",") if kind]
    return tuple(dict.fromkeys(named)), [word for word in words if word not in further]


def plan_model(request: PlanRequest, kinds: Sequence[str]) -> int:
    """Choose the hardware if none was named, then the layout on it. kinds: those that the user named."""
    from configs.hardware.catalog import catalog
    from engine.planner.catalog import find_model
    from engine.planner.choice.instances import counts
    from engine.planner.choice.selector import HardwareSelector
    from flows.folders import cache_folder

    assert request.model is not None
    architecture = find_model(request.model, cache_folder())
    selector = HardwareSelector(catalog(cache_folder(), request.own_catalog, request.assignments))
    named = request.accelerator
    if named is not None:
        known = selector.hardware
        device = known.instance(named).accelerator if "/" in named else known.accelerator(named)
        if kinds and device.kind not in kinds:
            raise ValueError(
                f"--hardware {' '.join(kinds)}: --accelerator {named} is {device.kind}. Leave one of them out"
            )
    choice: dict[str, Any] | None = None
    tried, machine = counts(request.distributed, request.gpus, request.max_gpus), None
    if request.accelerator is None:
        choice = selector.select_hardware_for_task(
            _family(request, architecture), architecture, request.mode, request.batch_size, request.distributed,
            request.gpus, max_gpus=request.max_gpus, available_hardware=tuple(kinds or HARDWARE),  # type: ignore[arg-type]
            sequence_length=request.sequence_length, new_tokens=request.new_tokens,
            max_memory_gb=request.max_memory_gb, critical=not request.spot,
        )  # fmt: skip
        tried, machine = (choice["gpu_count"],) if choice["gpu_count"] else tried, choice["instance"]
    for gpus in tried:  # the fewest that fit
        config = _config(selector, architecture, request, gpus, machine)
        if config["fits"]:
            break
    if request.learn_from is not None:
        config = _corrected(selector, architecture, request, config, machine)
    setup = config.pop("setup", None)
    if request.as_json:
        print(json.dumps({"hardware": choice, "plan": config}, indent=1))
    else:
        print_plan(config, choice, request.mode == "training")
    if request.output is not None:
        _write(request, {"hardware": choice, "plan": config}, setup)
    return PLANNED if config["fits"] else NOTHING_FITS


def _family(request: PlanRequest, architecture: "Architecture") -> str:
    """Return the user's task for the model, else the default of its kind."""
    from engine.planner.catalog import planned_family_of

    return request.family or planned_family_of(architecture)


def _config(
    selector: "HardwareSelector", architecture: "Architecture", request: PlanRequest, gpus: int, machine: str | None
) -> dict[str, Any]:
    named = request.accelerator
    common: dict[str, Any] = {"accelerator": named, "machine": machine}
    if named is not None and "/" in named:
        common = {"accelerator": None, "machine": named}
    common["market"] = "spot" if request.spot else "on_demand"
    if request.mode == "training":
        return selector.get_distributed_training_config(
            _family(request, architecture), architecture, gpus, request.batch_size, request.max_memory_gb,
            sequence_length=request.sequence_length, **common,
        )  # fmt: skip
    return selector.get_inference_config(
        _family(request, architecture), architecture, gpus, request.batch_size, request.max_memory_gb,
        prompt_tokens=request.sequence_length, new_tokens=request.new_tokens, **common,
    )  # fmt: skip


def _corrected(
    selector: "HardwareSelector",
    architecture: "Architecture",
    request: PlanRequest,
    config: dict[str, Any],
    machine: str | None,
) -> dict[str, Any]:
    """Return the configuration as predicted with what the runs of `--learn-from` teach of its accelerator."""
    from engine.planner.cells import interval
    from engine.planner.choice.selector import HardwareSelector
    from flows.cli.plan.learned import cell_of, learned_from

    assert request.learn_from is not None
    known, there = selector.hardware, config["machine"]
    device = known.instance(there).accelerator if "/" in there else known.accelerator(config["accelerator"])
    cell = cell_of(config, request.mode == "training")
    learned, remark = learned_from(request.learn_from, cell, architecture, device, selector.hardware)
    if learned is not None:
        corrected = HardwareSelector(selector.hardware, learned.times)
        config = _config(corrected, architecture, request, config["gpu_count"], machine)
        seconds = config["step_seconds" if request.mode == "training" else "batch_seconds"]
        if config["fits"]:
            low, high = interval(seconds, learned.factor) or (seconds, seconds)
            config["predicted_time"] |= {"low": low, "high": high, "factor": learned.factor}
            config |= {"support": remark, "measure_next": None}
    return config | {"correction": remark}


def _write(request: PlanRequest, answer: dict[str, Any], setup: Any) -> None:
    """Write the plan as JSON; into a folder, for training, with the files of every launcher that supports it."""
    from engine.planner.choice.launchers import FILES, launcher_files

    assert request.output is not None
    if request.output.suffix == ".json":
        write_output(request.output, json.dumps(answer, indent=1) + "\n")
        print(f"File             {request.output}", file=sys.stderr if request.as_json else sys.stdout)
        return
    request.output.mkdir(parents=True, exist_ok=True)
    files = {"plan.json": json.dumps(answer, indent=1) + "\n"}
    left_out: dict[str, str] = {}
    if setup is not None and answer["plan"]["fits"]:
        try:
            written = launcher_files(setup)
            files, left_out = files | written.files, written.left_out
        except ValueError as error:  # ranks that do not fill their nodes equally
            left_out = {"launcher files": str(error)}
    for name in FILES - files.keys():  # left by an earlier plan: never mix the files of two configurations
        (request.output / name).unlink(missing_ok=True)
    for name, text in files.items():
        write_atomically(request.output / name, text)
    say = sys.stderr if request.as_json else sys.stdout
    print(f"Files            {request.output}: {', '.join(files)}", file=say)
    for name, reason in left_out.items():
        print(f"Skipped          {name}: {reason}", file=say)


def _refused(message: str) -> int:
    print(message, file=sys.stderr)
    return WRONG_ARGUMENTS
