"""`HardwareSelector`: choose hardware for a task and a training configuration; results are dictionaries.

    selector = HardwareSelector()
    config = selector.get_distributed_training_config("text_generation", "facebook/opt-6.7b", gpu_count=4,
                                                      batch_size=8, max_memory_gb=16)
    config["distributed_strategy"], config["estimated_memory"]["per_gpu_gb"], config["explanation"]
    selector.select_hardware_for_task("text_generation", "llama-7b", "inference")["primary_recommendation"]

Results are plain data, for JSON too, but for `setup` of a training configuration: the `TrainingSetup` from which
`engine.planner.choice.launchers.launcher_files` makes files.

For training, `batch_size` is the sequences of one GPU in one optimizer step: global = batch_size x gpu_count. If they
do not fit at once they are split, so that per_gpu_batch_size x gradient_accumulation_steps = batch_size. (A layout with
tensor or pipeline parallelism splits the same global batch over fewer replicas.) For inference, `batch_size` is the
sequences served at once over all GPUs. GB is 10^9 bytes. Unknown prices stay None and rank last.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_args

from configs.common.base import plain_integer
from configs.hardware.catalog import HardwareCatalog, catalog
from configs.hardware.hardware import Accelerator, AcceleratorKind, Machine
from configs.hardware.prices import Market
from engine.planner.architecture import Architecture
from engine.planner.catalog import family_note, find_model
from engine.planner.choice.descriptions import (
    GB,
    deepspeed_dict,
    framework_of,
    fsdp_dict,
    inference_dict,
    memory_dict,
    rule_sentence,
    spread,
    supported,
    time_dict,
    title,
    training_dict,
)
from engine.planner.choice.explanations import explain_choice, explain_inference, mended, window_note
from engine.planner.choice.instances import Among, InstanceRequest, counts, inference_base, search_instances
from engine.planner.choice.launchers import sixteen_bit
from engine.planner.choice.lengths import TaskType, length_note, length_of, room_note
from engine.planner.choice.machines import DEFAULT_ACCELERATOR, machine_for, priced_machine, training_precision
from engine.planner.choice.rules import Rule, rule_of_thumb
from engine.planner.choice.search import LAUNCHABLE, EvaluatedSetup, divisors, evaluate_setup, ranked, with_memory_limit
from engine.planner.results import StepTime
from engine.planner.setup import TrainingSetup

_SHOWN = 5
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def _with_plain_integers(method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Let the method take integers of numpy and pandas, which its answer holds as Python's."""

    @wraps(method)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        return method(*map(plain_integer, args), **{name: plain_integer(value) for name, value in kwargs.items()})

    return called


class HardwareSelector:
    """Select hardware and configurations from one catalog of hardware and prices; `catalog` adds the user's layers.

    learned_times: measured over predicted seconds on the accelerator that a configuration is for.
    """

    def __init__(self, hardware: HardwareCatalog | None = None, learned_times: float = 1.0) -> None:
        self.hardware = hardware or catalog()
        self._learned_times = learned_times

    @_with_plain_integers
    def get_distributed_training_config(
        self,
        model_family: str,
        model_name: str | Architecture,
        gpu_count: int,
        batch_size: int,
        max_memory_gb: float | None = None,
        *,
        sequence_length: int | None = None,
        accelerator: str | Accelerator | None = None,
        machine: str | Machine | None = None,
        market: Market = "on_demand",
    ) -> dict[str, Any]:
        """Return the fastest predicted configuration that fits, the rule of thumb's choice, and the assumptions.

        accelerator, machine: hardware to train on, by catalog name, one of the two; none: an H100 is assumed and
        reported. market: the catalog's price to use; a custom `Machine` has its own price. If nothing fits: the setup
        with the lowest memory, `fits` False, what does not fit, and the smallest change that makes it fit.
        Raises ValueError: an unknown model (the message requests its config), a count below 1, an unknown machine or
        market.
        """
        _positive(
            gpu_count=gpu_count, batch_size=batch_size, max_memory_gb=max_memory_gb, sequence_length=sequence_length
        )
        architecture = _model(model_name)
        there, assumptions = self._machine(accelerator, machine, gpu_count, market)
        assumptions += family_note(architecture, model_family)
        length = length_of(architecture, sequence_length)
        assumptions += length_note(architecture, sequence_length, length)
        precision = training_precision(there.accelerator)
        base = TrainingSetup(architecture, there, sequence_length=length, precision=precision)
        limit = None if max_memory_gb is None else int(max_memory_gb * GB)
        found = ranked(base, gpu_count, gpu_count * batch_size, with_memory_limit(LAUNCHABLE, limit))
        everything = ranked(base, gpu_count, gpu_count * batch_size, with_memory_limit(None, limit))
        chosen = found[0] if found[0].fits or not everything[0].fits else everything[0]
        return self._training_answer(chosen, found, everything, limit) | {
            "model_family": model_family,
            "market": market,
            "assumptions": assumptions,
        }

    @_with_plain_integers
    def get_inference_config(
        self,
        model_family: str,
        model_name: str | Architecture,
        gpu_count: int,
        batch_size: int = 1,
        max_memory_gb: float | None = None,
        *,
        prompt_tokens: int | None = None,
        new_tokens: int = 128,
        accelerator: str | Accelerator | None = None,
        machine: str | Machine | None = None,
        market: Market = "on_demand",
    ) -> dict[str, Any]:
        """Return the layout with the lowest latency for `batch_size` sequences; as
        `get_distributed_training_config`.
        """
        _positive(
            gpu_count=gpu_count, batch_size=batch_size, max_memory_gb=max_memory_gb, new_tokens=new_tokens,
            prompt_tokens=prompt_tokens,
        )  # fmt: skip
        architecture = _model(model_name)
        there, assumptions = self._machine(accelerator, machine, gpu_count, market)
        limit = None if max_memory_gb is None else int(max_memory_gb * GB)
        base = inference_base(architecture, there, length_of(architecture, prompt_tokens, "inference"), new_tokens)
        found = ranked(base, gpu_count, batch_size, with_memory_limit(None, limit))
        chosen = found[0]
        return inference_dict(chosen) | {
            "model_name": architecture.name,
            "model_family": model_family,
            "market": market,
            "model_parameters": architecture.parameters,
            "assumptions": [
                *assumptions,
                *family_note(architecture, model_family),
                *length_note(architecture, prompt_tokens, base.prompt_tokens, "inference"),
                *room_note(architecture, base.prompt_tokens, new_tokens),
                *window_note(chosen, limit),
            ],
            "gpu_count": gpu_count,
            "batch_size": batch_size,
            "prompt_tokens": base.prompt_tokens,
            "new_tokens": new_tokens if architecture.decoder_layers else 0,
            "accelerator": there.accelerator.name,
            "machine": there.name,
            "nodes": -(-gpu_count // there.accelerators),
            "usd_per_hour": there.usd_per_hour and there.usd_per_hour * -(-gpu_count // there.accelerators),
            "estimated_memory": memory_dict(chosen.memory, gpu_count),
            "predicted_time": spread(chosen),
            **supported(chosen),
            "candidates": [inference_dict(each) for each in _distinct(found)],
            "does_not_fit": [inference_dict(each) for each in found if not each.fits],
            "explanation": explain_inference(chosen, limit),
            "smallest_change": None if chosen.fits else mended(chosen.setup, limit),
        }

    @_with_plain_integers
    def select_hardware_for_task(
        self,
        model_family: str,
        model_name: str | Architecture,
        task_type: TaskType = "inference",
        batch_size: int = 1,
        distributed: bool = False,
        gpu_count: int | None = None,
        *,
        max_gpus: int | None = None,
        available_hardware: Sequence[AcceleratorKind] = ("cuda", "rocm", "cpu"),
        accelerators: Sequence[str] | None = None,
        sequence_length: int | None = None,
        new_tokens: int = 128,
        max_memory_gb: float | None = None,
        min_tokens_per_second: float | None = None,
        max_seconds_per_token: float | None = None,
        providers: Sequence[str] | None = None,
        critical: bool = True,
        region: str | None = None,
    ) -> dict[str, Any]:
        """Return instances for the task, the cheapest that fits and reaches the speed first.

        gpu_count: devices; None: the fewest of 1, 2, 4 ... max_gpus that fit and reach the speed (without `distributed`
        and max_gpus: one).
        critical: False uses spot prices if known. Raises ValueError as above, and for unknown words.
        """
        _positive(
            batch_size=batch_size, gpu_count=gpu_count, max_gpus=max_gpus, max_memory_gb=max_memory_gb,
            sequence_length=sequence_length, new_tokens=new_tokens, min_tokens_per_second=min_tokens_per_second,
            max_seconds_per_token=max_seconds_per_token,
        )  # fmt: skip
        _known("task_type", task_type, ("training", "inference"))
        for kind in available_hardware:
            _known("available_hardware", kind, ("cuda", "rocm", "cpu"))
        offered = dict.fromkeys(name.split("/")[0] for name in self.hardware.names("instances"))
        for provider in providers or ():
            _known("providers", provider, list(offered))
        if task_type == "training" and max_seconds_per_token is not None:
            raise ValueError("max_seconds_per_token: has no effect on training. Use min_tokens_per_second")
        architecture = _model(model_name)
        market: Market = "on_demand" if critical else "spot"
        wish = InstanceRequest(
            architecture=architecture, training=task_type == "training", batch_size=batch_size,
            counts=counts(distributed, gpu_count, max_gpus),
            sequence_length=length_of(architecture, sequence_length, task_type), new_tokens=new_tokens,
            max_memory_bytes=None if max_memory_gb is None else int(max_memory_gb * GB),
            min_tokens_per_second=min_tokens_per_second, max_seconds_per_token=max_seconds_per_token,
            market=market, region=region,
        )  # fmt: skip
        names = None if accelerators is None else {self.hardware.accelerator(name).name for name in accelerators}
        among = Among(
            None if providers is None else tuple(providers), tuple(available_hardware),
            None if names is None else frozenset(names),
        )  # fmt: skip
        widen = gpu_count is None and not distributed and max_gpus is None
        options, notes = search_instances(wish, self.hardware, among, widen)
        answer = options.answer()
        return answer | {
            "model_name": architecture.name,
            "model_family": model_family,
            "task_type": task_type,
            "distributed": answer["gpu_count"] is not None and answer["gpu_count"] > 1,
            "market": market,
            "assumptions": notes + family_note(architecture, model_family),
        }

    def _machine(
        self, accelerator: str | Accelerator | None, machine: str | Machine | None, gpu_count: int, market: Market
    ) -> tuple[Machine, list[str]]:
        _known("market", market, get_args(Market))
        if accelerator is not None and machine is not None:
            raise ValueError("accelerator, machine: mutually exclusive. A machine names its accelerator itself")
        if machine is not None:
            if isinstance(machine, Machine):
                return machine, []
            there = self.hardware.instance(machine)
            return self._learned(priced_machine(there, market, self.hardware, self.hardware.region_in(machine))), []
        assumptions = []
        if accelerator is None:
            accelerator = DEFAULT_ACCELERATOR
            assumptions = [f"no accelerator was named; {accelerator} is assumed"]
        device = accelerator if isinstance(accelerator, Accelerator) else self.hardware.accelerator(accelerator)
        return self._learned(machine_for(device, gpu_count, self.hardware, market)), assumptions

    def _learned(self, machine: Machine) -> Machine:
        device = machine.accelerator.model_copy(update={"learned_times": self._learned_times})
        return machine.model_copy(update={"accelerator": device})

    def _training_answer(
        self, chosen: EvaluatedSetup, found: list[EvaluatedSetup], everything: list[EvaluatedSetup], limit: int | None
    ) -> dict[str, Any]:
        setup = chosen.setup
        assert isinstance(setup, TrainingSetup)
        rule, theirs = self._rule(setup, limit)
        half = setup.precision != "float32"
        machine = setup.machine
        nodes = -(-setup.layout.ranks // machine.accelerators)
        answer = training_dict(chosen) | {
            "model_name": setup.architecture.name,
            "model_parameters": setup.architecture.parameters,
            "gpu_count": setup.layout.ranks,
            "sequence_length": setup.sequence_length,
            "accelerator": machine.accelerator.name,
            "machine": machine.name,
            "nodes": nodes,
            "usd_per_hour": machine.usd_per_hour and machine.usd_per_hour * nodes,
            "mixed_precision": half,
            "mixed_precision_dtype": sixteen_bit(setup),
            "precision": setup.precision,
            "estimated_memory": memory_dict(chosen.memory, setup.layout.ranks),
            "rule_of_thumb": training_dict(theirs) | {
                "choice": rule.words, "sentence": rule_sentence(rule, theirs, chosen),
            },
            "candidates": [training_dict(each) for each in _distinct(found)],
            "fastest_layout": training_dict(everything[0]),
            "does_not_fit": _misfits(found),
            "explanation": explain_choice(chosen, found, limit),
            "smallest_change": None if chosen.fits else mended(setup, limit),
            "setup": setup,
            **supported(chosen),
        }  # fmt: skip
        if isinstance(chosen.time, StepTime):
            answer["predicted_time"] = time_dict(chosen.time) | (spread(chosen) or {})
        if framework_of(setup) == "DeepSpeed":
            answer["deepspeed_config"] = deepspeed_dict(setup)
        elif framework_of(setup) == "FSDP":
            answer["fsdp_config"] = fsdp_dict(setup)
        return answer

    def _rule(self, setup: TrainingSetup, limit: int | None) -> tuple[Rule, EvaluatedSetup]:
        """Return the rule's choice at its fastest micro-batch."""
        gpus, each = setup.layout.ranks, setup.global_batch // setup.layout.ranks

        def best(rule: Rule) -> EvaluatedSetup:
            tried = [
                evaluate_setup(
                    rule.setup(setup.replace(micro_batch=micro, accumulation=each // micro), gpus),
                    limit,
                )
                for micro in divisors(each)
            ]
            fitting = [candidate for candidate in tried if candidate.fits]
            return min(fitting, key=lambda candidate: candidate.seconds or 0.0) if fitting else tried[0]

        rule = rule_of_thumb(setup.architecture.parameters, gpus, lambda rule: best(rule).fits)
        return rule, best(rule)


def _distinct(found: Sequence[EvaluatedSetup]) -> list[EvaluatedSetup]:
    """Return the fastest fitting candidate of each layout, strategy, checkpointing and offload."""
    best: dict[str, EvaluatedSetup] = {}
    for each in found:
        if each.fits:
            best.setdefault(title(each.setup), each)
    return list(best.values())[:_SHOWN]


def _misfits(found: Sequence[EvaluatedSetup]) -> list[dict[str, Any]]:
    return [training_dict(each) for each in found if not each.fits]


def _model(name: str | Architecture) -> Architecture:
    return name if isinstance(name, Architecture) else find_model(name)


_FRACTIONS = ("max_memory_gb", "min_tokens_per_second", "max_seconds_per_token")
_MOST = {"gpu_count": 65_536, "max_gpus": 65_536, "batch_size": 1_000_000_000, "max_memory_gb": 1_000_000_000}
"""Layouts go no further, and of a batch every divisor is tried."""


def _positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        fraction, most = name in _FRACTIONS, _MOST.get(name, math.inf)
        if number is not None and not ((fraction or isinstance(number, int)) and 0 < number < math.inf):
            raise ValueError(f"{name}: {number!r} is not a {'number' if fraction else 'whole number'} above 0")
        if number is not None and number > most:
            raise ValueError(f"{name}: got {number:,}, expected at most {most:,}")


def _known(field: str, word: str, words: Sequence[str]) -> None:
    if word not in words:
        raise ValueError(f"{field}: {word!r} is not known; use one of: {', '.join(words)}")
