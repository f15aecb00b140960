"""The `script` workload: a program of the user's, started by the launcher of its choice and measured from outside.

    ScriptWorkload(command=("train.py", "--micro-batch", "{micro_batch_size}"), micro_batch_size=4,
                   tokens_per_step="{micro_batch_size} * {dp} * 1024")

Placeholders in braces carry the cell's fields to the program: in its arguments, its environment, and its configuration
files. `docs/how-to/own-program.md` shows each.
"""

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.common.base import Frozen
from configs.common.execution import Layout
from configs.common.files.reading import brief
from configs.common.secrets import holds_secret
from configs.common.variables import VARIABLE_NAME
from configs.workloads.descriptor import BaseWorkload, Combination, ComparedLatency, Descriptor, ShownTime
from configs.workloads.placeholders import ParameterValue, argument_text, arithmetic, filled_text, names_in
from configs.workloads.script_figures import (
    PRESETS,
    RANK_RATE,
    RATE,
    UNITS,
    EventFiles,
    JsonFigures,
    LinePattern,
    PresetName,
)

ScriptLauncher = Literal["torchrun", "deepspeed", "accelerate", "mpirun", "srun", "none"]
Measure = Literal["probe", "lines", "tensorboard", "hf_trainer", "lightning", "json", "wall"]
PlannedFile = Literal["torch", "deepspeed", "accelerate", "trainer"]
Argument = Annotated[str, Field(max_length=4000)]
VariableName = Annotated[str, Field(pattern=VARIABLE_NAME)]
ParameterName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,59}$")]

FIELDS = ("micro_batch_size", "accumulation_steps", "sequence_length", "activation_checkpointing")
"""Fields of the workload that a placeholder can carry."""
CELL_FIELDS = (
    "dp", "tp", "pp", "strategy", "dtype", "ranks", "ranks_per_node", "nodes", "cores_per_rank", "model", "repeat"
)  # fmt: skip
"""Placeholders of the cell: its layout, precision and place, and the number of the repeat (a seed, for one)."""
CARRIED: dict[PlannedFile, frozenset[str]] = {
    "torch": frozenset({"tp", "pp", "strategy", "dtype", *FIELDS}),
    "deepspeed": frozenset({"strategy", "dtype", "micro_batch_size", "accumulation_steps"}),
    "accelerate": frozenset({"strategy", "dtype"}),
    "trainer": frozenset({"strategy", "dtype", "micro_batch_size", "accumulation_steps", "activation_checkpointing"}),
}
"""Fields of a cell that a file written by the planner carries to the script."""
STARTED = {
    "command", "launcher", "python", "inputs", "templates", "environment", "config_files", "planned_files",
    "arguments", "params",
}  # fmt: skip
"""Fields that say what is started: to sweep one changes what runs, whatever the placeholders are."""
TEMPLATE_SUFFIX = ".j2"


class StopAfter(Frozen):
    """When a script that goes on is ended; the measurement is then complete."""

    steps: PositiveInt | None = Field(None, description="steps that were counted, warm-up included")
    minutes: PositiveFloat | None = Field(None, description="of wall time since the first step")

    @model_validator(mode="after")
    def _one(self) -> "StopAfter":
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("expected either steps or minutes")
        return self


class ScriptWorkload(BaseWorkload):
    """A training script, an engine or any command, measured without a change or by one line in it."""

    kind: Literal["script"] = "script"
    command: tuple[Argument, ...] = Field(min_length=1, max_length=1000, description="program and arguments")
    launcher: ScriptLauncher = Field("torchrun", description="what starts its ranks; none: one process on each node")
    python: str | None = Field(None, description="interpreter of a .py command and its launcher; none: Rankwise's")
    inputs: tuple[str, ...] = Field((), max_length=100, description="files and folders, copied; part of the key")
    templates: tuple[str, ...] = Field((), description="inputs that end in .j2, rendered by Jinja beside themselves")
    environment: dict[VariableName, Argument] = Field({}, description="variables, with placeholders")
    config_files: dict[str, dict[str, Any]] = Field({}, description="JSON or YAML files to write, with placeholders")
    planned_files: dict[str, PlannedFile] = Field(
        {}, description="JSON files that the planner writes for each cell; config_files of the same name add to them"
    )
    arguments: dict[str, dict[str, tuple[Argument, ...]]] = Field(
        {}, description="field -> value -> arguments to append: {strategy: {fsdp: [--fsdp, full_shard]}}"
    )
    params: dict[ParameterName, ParameterValue] = Field(
        {}, description="free parameters, {params.name} in a placeholder"
    )
    micro_batch_size: PositiveInt | None = Field(None, description="sequences that a rank computes at once")
    accumulation_steps: PositiveInt | None = Field(None, description="micro-batches of a rank in a step")
    sequence_length: PositiveInt | None = None
    activation_checkpointing: str | None = Field(None, max_length=60)
    tokens_per_step: PositiveInt | str | None = Field(
        None, description="tokens of one step over all ranks: a number, or arithmetic of placeholders"
    )
    items_per_step: PositiveInt | str | None = Field(None, description="instead of tokens: items of `unit`")
    unit: str = Field("token", pattern=r"^[A-Za-z][A-Za-z0-9_ /-]{0,29}$", description="what throughput counts")
    measure: Measure = Field("probe", description="where step times and figures come from")
    lines: LinePattern | None = Field(None, description="with measure lines: a pattern")
    preset: PresetName | None = Field(None, description="with measure lines: a known program's pattern")
    tensorboard: EventFiles = EventFiles()
    json_figures: JsonFigures | None = Field(None, description="with measure json: where its figures are")
    combine: Combination | None = Field(
        None, description="how units and rates of ranks are combined; none: sum of a probe's, else rank 0"
    )
    stop_after: StopAfter | None = Field(None, description="ends a script that goes on; none: it ends by itself")
    warmup_steps: NonNegativeInt | None = Field(
        None, description="steps that are cut at the beginning; none: measuring.warmup"
    )
    hang_seconds: PositiveFloat | None = Field(
        300.0, description="without a step for so long it hangs (before the first: without output); none: never"
    )
    model: str | None = Field(
        None, max_length=300, description="name of a model of the study, whose prediction stands beside the figures"
    )

    @field_validator("inputs", "templates")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise ValueError("expected each file or folder once, by its name")
        return names

    @field_validator("config_files", "planned_files")
    @classmethod
    def _inside(cls, files: dict[str, Any]) -> dict[str, Any]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.suffix not in (".json", ".yaml", ".yml"):
                raise ValueError(f"{brief(name)}: expected a relative name that ends in .json or .yaml")
        return files

    @model_validator(mode="after")
    def _consistent(self) -> "ScriptWorkload":
        if self.tokens_per_step is not None and self.items_per_step is not None:
            raise ValueError("workload.items_per_step: mutually exclusive with tokens_per_step. Leave one of them out")
        if self.items_per_step is not None and self.unit == "token":
            raise ValueError("workload.unit: required with items_per_step. Name what is counted, such as sample")
        if self.tokens_per_step is not None and self.unit != "token":
            raise ValueError("workload.unit: tokens_per_step counts tokens. Use items_per_step")
        wanted = {"lines": self.lines or self.preset, "json": self.json_figures}
        if self.measure in wanted and wanted[self.measure] is None:
            field = {"lines": "lines.pattern or preset", "json": "json_figures.figures"}[self.measure]
            raise ValueError(f"workload.{field}: required by measure {self.measure}. Say where its figures are")
        if self.lines is not None and self.preset is not None:
            raise ValueError("workload.preset: mutually exclusive with lines. Leave one of them out")
        if (self.lines or self.preset) and self.measure != "lines":
            raise ValueError(f"workload.measure: got {self.measure}, but lines are given. Use lines")
        if self.json_figures is not None and self.measure != "json":
            raise ValueError(f"workload.measure: got {self.measure}, but json_figures are given. Use json")
        if self.tensorboard != EventFiles() and self.measure != "tensorboard":
            raise ValueError(f"workload.measure: got {self.measure}, but tensorboard is given. Use tensorboard")
        if self.measure in ("wall", "json") and self.stop_after is not None and self.stop_after.steps is not None:
            raise ValueError(f"workload.stop_after.steps: measure {self.measure} counts no steps. Use minutes")
        loose = [name for name in self.templates if not name.endswith(TEMPLATE_SUFFIX)]
        if loose:
            raise ValueError(f"workload.templates: {loose[0]}: expected a name that ends in {TEMPLATE_SUFFIX}")
        secret = next((name for name, value in self.environment.items() if holds_secret(name, value)), None)
        if secret is not None:
            raise ValueError(
                f"workload.environment.{secret}: looks like a secret, and a study file is kept beside the results. "
                "Let the script read it from a file"
            )
        return self

    def check_warmup(self, warmup: int) -> None:
        steps = None if self.stop_after is None else self.stop_after.steps
        field = "measuring.warmup" if self.warmup_steps is None else "workload.warmup_steps"
        cut = warmup if self.warmup_steps is None else self.warmup_steps
        if steps is not None and steps <= cut:
            raise ValueError(
                f"workload.stop_after.steps: {steps} leaves none to measure after {field} of {cut}. "
                f"Use at least {cut + 1}"
            )

    def carried(self) -> set[str]:
        """Fields that reach the script by files of the planner."""
        return {field for kind in self.planned_files.values() for field in CARRIED[kind]}

    def planned_name(self, kind: PlannedFile) -> str | None:
        """Name of the first file of a kind that the planner writes."""
        return next((name for name, found in self.planned_files.items() if found == kind), None)

    def placeholders(self) -> set[str]:
        """Names that reach the script by arguments, environment or configuration files."""
        texts = [*self.command, *self.environment.values(), *_leaves(self.config_files)]
        texts += [text for chosen in self.arguments.values() for words in chosen.values() for text in words]
        return names_in(*texts) | set(self.arguments)

    def values(
        self, layout: Layout, more: dict[str, ParameterValue | None] | None = None
    ) -> dict[str, ParameterValue | None]:
        """Value of each placeholder; None for a field that the cell does not set."""
        found: dict[str, ParameterValue | None] = {name: getattr(self, name) for name in FIELDS}
        found |= {f"params.{name}": value for name, value in self.params.items()}
        found |= {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "strategy": layout.strategy}
        return found | {"ranks": layout.ranks} | (more or {})

    def units_per_step(self, layout: Layout) -> int | None:
        """Units of one step over all ranks; None where only the records say. Raises ValueError naming the field."""
        field = "tokens_per_step" if self.tokens_per_step is not None else "items_per_step"
        given = getattr(self, field)
        if given is None or isinstance(given, int):
            return given
        try:
            value = arithmetic(filled_text(given, self.values(layout)))
        except KeyError as error:
            name = error.args[0]
            why = self._why_empty(name) if name not in CELL_FIELDS else "is not known to its arithmetic"
            known = ", ".join(name for name, value in self.values(layout).items() if value is not None)
            raise ValueError(f"workload.{field}: {{{name}}} {why}\n  use one of: {known}") from error
        except ValueError as error:
            raise ValueError(f"workload.{field}: {error}") from error
        if value < 1 or value != int(value):
            raise ValueError(f"workload.{field}: {given} is {value:g}, expected a whole number of at least 1")
        return int(value)

    def argv(self, values: dict[str, ParameterValue | None]) -> list[str]:
        """The command with its placeholders filled. Raises KeyError for one without a value."""
        words = [filled_text(word, values) for word in self.command]
        for field, chosen in self.arguments.items():
            value = values.get(field)
            if value is None:
                raise KeyError(field)
            words += [filled_text(word, values) for word in chosen.get(argument_text(value), ())]
        return words

    @property
    def pattern(self) -> LinePattern | None:
        """The pattern of lines, of its own or of a preset."""
        return PRESETS[self.preset] if self.preset is not None else self.lines

    @property
    def combined(self) -> Combination:
        """How units of ranks are combined."""
        return self.combine or ("sum" if self.measure == "probe" else "rank_0")

    @property
    def counted(self) -> str:
        """The unit that throughput counts: steps, where neither the study nor the source of figures has another."""
        if self.unit != "token" or self.tokens_per_step is not None or self.measure == "probe":
            return self.unit
        names = (
            set(self.pattern.groups) if self.pattern else set(self.json_figures.figures) if self.json_figures else set()
        )
        return self.unit if names & {UNITS, RATE, RANK_RATE} else "step"

    @property
    def energy_is_of_start_too(self) -> bool:
        """Of a program that is timed by its steps, and not as a whole or by what it says itself."""
        return self.measure not in ("json", "wall")

    @property
    def counts_calls(self) -> bool:
        """Whether the steps themselves count, whatever the probe or a Trainer tells; a line may tell of how many."""
        return self.counted == "step" and self.measure not in ("lines", "json")

    @property
    def without_effect(self) -> dict[str, str]:
        by_rank = self.measure in ("probe", "hf_trainer", "lightning")
        needed = {
            # Lines, event files and JSON are those of one rank.
            "combine": (by_rank or self.combined == "rank_0", "measure: probe, hf_trainer or lightning"),
            "warmup_steps": (self.measure not in ("wall", "json"), "a measure of single steps, such as probe"),
        }
        return {name: what for name, (is_used, what) in needed.items() if not is_used and getattr(self, name)}

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        first, *rest = self.command
        if PurePosixPath(first).name.startswith("python"):
            named_one = (word for word in rest if not word.startswith("-") and len(word.split()) == 1)
            first = first if "-c" in rest else next(named_one, first)
        words = [PurePosixPath(first).name]
        words += [f"micro batch {self.micro_batch_size}"] if self.micro_batch_size else []
        words += [f"{name} {argument_text(value)}" for name, value in self.params.items()]
        words += [f"accumulation {self.accumulation_steps}"] if self.accumulation_steps else []
        words += [f"{self.activation_checkpointing} checkpointing"] if self.activation_checkpointing else []
        return ", ".join(words)[:200]

    @property
    def shows_dtype(self) -> bool:
        return "dtype" in self.placeholders()

    @property
    def process_state(self) -> dict[str, Any]:
        """Each cell is a program of its own, in a launch of its own."""
        return {"script": self.model_dump(mode="json")}

    def training_beside(self, layout: Layout) -> dict[str, Any] | None:
        """Fields of a `train` workload that does what this script is told to; None where they are not all given."""
        if self.micro_batch_size is None or self.sequence_length is None:
            return None
        batch = self.micro_batch_size * (self.accumulation_steps or 1) * layout.dp
        fields: dict[str, Any] = {"global_batch_size": batch, "micro_batch_size": self.micro_batch_size}
        fields |= {"sequence_length": self.sequence_length}
        if self.activation_checkpointing in ("none", "selective", "full"):
            fields["activation_checkpointing"] = self.activation_checkpointing
        return fields

    @property
    def model_beside(self) -> str | None:
        return self.model

    def work_of_step(self, layout: Layout) -> tuple[str, int | None] | None:
        field = "tokens_per_step" if self.items_per_step is None else "items_per_step"
        return f"workload.{field}", self.units_per_step(layout)

    def described(self, descriptor: Descriptor) -> Descriptor:
        """The descriptor for what this script counts."""
        if self.counted == "token":
            return descriptor
        return replace(descriptor, unit=self.counted, throughput="items_per_second", predicted=("items_per_second",))

    def scaled(self, factor: int) -> "ScriptWorkload":
        """Its fields are those of a rank already."""
        return self

    def check(self, layout: Layout) -> None:
        known = set(self.values(layout)) | set(CELL_FIELDS) | {"workdir"}
        for name in sorted(self.placeholders() | names_in(*map(str, (self.tokens_per_step, self.items_per_step)))):
            if name not in known:
                raise ValueError(
                    f"workload.command: {{{name}}} {self._why_empty(name)}\n  use one of: {', '.join(sorted(known))}"
                )
        empty = {name for name, value in self.values(layout).items() if value is None} & self.placeholders()
        if empty:
            name = min(empty)
            raise ValueError(f"workload.{name}: {{{name}}} is used, but {name} is not set. Set it")
        if (
            layout.strategy.startswith("zero")
            and self.planned_name("accelerate") is not None
            and self.planned_name("deepspeed") is None
        ):
            raise ValueError(
                f"workload.planned_files: Accelerate reads strategy {layout.strategy} from a file of DeepSpeed. "
                "Add deepspeed.json: deepspeed"
            )
        if self.launcher == "none" and layout.strategy not in ("none", "ddp"):
            raise ValueError(f"layout.strategy: got {layout.strategy}, but launcher none starts no ranks. Use torchrun")
        self.units_per_step(layout)

    def _why_empty(self, name: str) -> str:
        if name.startswith("params."):
            return f"has no value: workload.params has {', '.join(self.params) or 'nothing'}"
        return "is not set" if name in FIELDS else "is no field of a cell"


def _leaves(value: Any) -> list[str]:
    """All texts in nested data."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in _leaves(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _leaves(item)]
    return [value] if isinstance(value, str) else []


DESCRIPTOR = Descriptor(
    kind="script",
    model=ScriptWorkload,
    unit="token",
    throughput="tokens_per_second",
    columns=("step_seconds", "step_units"),
    latencies={"step": "step_seconds"},
    latency=ComparedLatency("step_seconds", "ms a step", waited_for="step"),
    times=(ShownTime("step_seconds", "ms a step"),),
    predicted=("tokens_per_second",),
    series="step_seconds",
    pass_name="step",
    axes=("dp", "tp", "pp"),
    batch="micro_batch_size",
    batch_fields=("micro_batch_size",),
    has_strategy=True,
    input_fields=("inputs",),
    own_program=True,
)
