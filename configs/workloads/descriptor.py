"""What the layers above need to know of a kind of workload, stated once: units, columns, latency, axes, limits.

Each kind's module has its fields (a `BaseWorkload`) and its `DESCRIPTOR`. What follows from the fields of one cell is
a method of the workload; what holds for every cell of the kind stands in the descriptor.

    descriptor_of(cell.workload).latency.unit        # "ms TPOT"; configs.workloads has the lookup
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from configs.common.base import Frozen
from configs.common.execution import Engine, Layout
from configs.families.sizes import ModelForm

Axis = Literal["dp", "tp", "pp"]
AnswerForm = Literal["tokens", "vectors"]
RateFigure = Literal["tokens_per_second", "embeddings_per_second", "items_per_second"]
TimeFigure = Literal["latency_seconds", "time_per_output_token_seconds", "ttft_seconds", "step_seconds"]
GroupTransportKind = Literal["auto", "shared memory", "gloo", "nccl"]

Combination = Literal["rank_0", "sum", "max"]


class BaseWorkload(Frozen):
    """What every workload answers; the defaults are those of work that has no model, prompts or state."""

    @property
    def keeps_answers(self) -> bool:
        """Whether the cell is measured for what the model answers; its speed is then not compared."""
        return False

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a further attempt resumes where the last one was lost."""
        return False

    @property
    def prompt_source(self) -> tuple[str, str | None, int | None] | None:
        """(file, variant, limit) of its prompts; None where it has none, or random ones."""
        return None

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether it reads text and names no tokenizer, so that the model must bring one."""
        return False

    @property
    def process_state(self) -> dict[str, Any]:
        """Fields that fix the state of the process: cells can share a launch only where these are equal."""
        return {}

    @property
    def group_transport(self) -> GroupTransportKind:
        """What the engine's process groups send over."""
        return "auto"

    @property
    def sequences(self) -> int | None:
        """Sequences over all replicas that can be shared out: the most replicas with work; None for other work."""
        return None

    def units_per_pass(self, dp: int) -> int | None:
        """Units (`Descriptor.unit`) of a pass over `dp` replicas; None where only the records say."""
        return None

    @property
    def passes(self) -> int | None:
        """So many passes (or steps) exactly; None: the study's measuring rules decide."""
        return None

    def check_warmup(self, warmup: int) -> None:
        """Raise ValueError where `warmup`, the study's, leaves none of a fixed number of steps to measure."""

    def check_batch(self, replicas: int = 1) -> None:
        """Raise ValueError where no replica ever gets a full batch: smaller ones would be shown under its name."""

    @property
    def min_timeout_seconds(self) -> float:
        """A time limit below which the fields make no sense; the study's, where it is longer, holds."""
        return 0.0

    def known_seconds(self, ranks: int) -> float | None:
        """Seconds of a pass on so many ranks where the fields state them; None where a model decides."""
        return None

    @property
    def known_bytes(self) -> int:
        """Memory of each rank that the fields state, in bytes."""
        return 0

    def size_of_pass(self, dp: int) -> tuple[int, int | None, int] | None:
        """Of one replica of `dp`: (sequences at once, tokens read of each, tokens written of each).

        Tokens read are None where the prompts decide. None for work that has no sequences.
        """
        return None

    def bytes_per_parameter(self, layout: Layout, width: int) -> int | None:
        """What all ranks together hold at least for each parameter, whose weight has `width` bytes; None: unknown."""
        return width * layout.dp

    def most_replicas(self) -> tuple[int, str] | None:
        """The most replicas that a strong scaling experiment feeds, and why no more; None where nothing limits it."""
        return None

    def compared_fields(self, dp: int) -> dict[str, Any]:
        """The fields that should stay equal between points of a scaling experiment, on `dp` replicas."""
        return self.model_dump(mode="json")

    @property
    def shows_dtype(self) -> bool:
        """Whether the cell's precision says something of the work."""
        return True

    @property
    def model_beside(self) -> str | None:
        """A model of the study whose prediction stands beside the figures; the work itself needs none."""
        return None

    def training_beside(self, layout: Layout) -> dict[str, Any] | None:
        """Fields of the training of `model_beside` that is predicted; None where they are not known."""
        return None

    def work_of_step(self, layout: Layout) -> tuple[str, int | None] | None:
        """(field, units of a step) that must be equal in strong scaling; None where the fields make it so."""
        return None

    @property
    def combined(self) -> Combination:
        """How units that each rank counts become those of the job."""
        return "rank_0"

    @property
    def energy_is_of_start_too(self) -> bool:
        """Whether energy is counted from a program's start on, though its steps alone are timed."""
        return False

    @property
    def counts_calls(self) -> bool:
        """Whether throughput counts the steps themselves, whatever units are told of each."""
        return False

    def described(self, descriptor: "Descriptor") -> "Descriptor":
        """The descriptor of the kind as it is for these fields."""
        return descriptor

    @property
    def without_effect(self) -> dict[str, str]:
        """Fields that are set and do nothing -> what they would need."""
        return {}

    @property
    def server_only(self) -> dict[str, str]:
        """Fields that are set and do nothing on an endpoint, a server that is there already -> what they would need."""
        return {}

    @property
    def longest_sequence(self) -> tuple[str, int, str] | None:
        """(field, positions, words for them) of the longest sequence that the fields ask for; None where there is none,
        or a file decides.
        """
        return None

    def check(self, layout: Layout) -> None:
        """Refuse a layout that these fields cannot run in. Raises ValueError naming the field."""


@dataclass(frozen=True)
class ComparedLatency:
    """The time that cells of a kind are compared by.

    figure: a field of `configs.records.rates.Rates`. unit: how a table heads it, in milliseconds. waited_for: the
    latency (key of `Descriptor.latencies`) whose percentiles a report gives. awaited: whether anybody waits for it: of
    a workload that only times the pipeline nobody does, and no section is written of it.
    """

    figure: TimeFigure
    unit: str
    waited_for: str
    awaited: bool = True


@dataclass(frozen=True)
class ShownTime:
    """A time that tables of cells have a column for: a field of `Rates`, headed by its unit in milliseconds.

    extra: beside the latency that cells are compared by.
    """

    figure: TimeFigure
    unit: str
    extra: bool = False


@dataclass(frozen=True)
class Descriptor:
    """One kind of workload.

    kind, model: the tag and the class of the fields. unit: one of what throughput counts. throughput: the field of
    `Rates` (and of `Prediction`) that cells are judged by. series: the column of wall times, one for each pass (or
    step, `pass_name`). columns: of the samples that rates are computed from. latencies: name of what takes time -> its
    column. times: figures of tables, the latency first. predicted: figures that a prediction is judged by.
    """

    kind: str
    model: type[BaseWorkload]
    unit: str
    throughput: RateFigure
    columns: tuple[str, ...]
    latencies: dict[str, str]
    latency: ComparedLatency | None
    times: tuple[ShownTime, ...] = ()
    predicted: tuple[RateFigure | TimeFigure, ...] = ()
    series: str = "pass_seconds"
    pass_name: str = "pass"

    # What can be varied, and what is refused.
    axes: tuple[Axis, ...] = ("dp",)
    """Degrees of a layout that may be above 1."""
    layout_rule: Callable[[Layout], None] | None = None
    """Raises ValueError for a layout that no cell of the kind has; None: any of `axes`, unless `check` refuses it."""
    engines: tuple[Engine, ...] = ("rankwise",)
    grows: str | None = None
    """The field that weak scaling grows with the replicas; None: the work of a rank does not depend on their number."""
    batch_fields: tuple[str, ...] = ()
    """Fields that set the batch and follow from it; cells that differ in nothing else form a series over batches."""
    batch: str | None = None
    """The one of these that names the batch."""
    compressible: bool = False
    has_strategy: bool = False

    # What the work needs, does and leaves.
    needs_model: bool = False
    model_form: ModelForm | None = None
    """The kind of model that it is for; None: several, or none."""
    takes_prompts: bool = False
    input_fields: tuple[str, ...] = ()
    """Fields that name files, which are copied beside the run."""
    decodes: bool = False
    """Whether a request is answered token by token."""
    answers: AnswerForm | None = None
    """The form of answers that can be judged; None: it has none."""
    trains: bool = False
    """Whether weights are learnt: gradients and optimizer states are held and exchanged."""
    own_groups: bool = False
    """Whether our engine exchanges data by its own communicators (else by torch's process groups, or not at all)."""
    own_program: bool = False
    """Whether it is a program of the user's: started as it is, by one agent on each node, and measured from outside."""
    starts_server: bool = False
    """Whether the launch is one process that starts a server, whose ranks are the layout's, and a load generator."""
    marks_work: bool = False
    """Whether it marks what a profiler is to record."""
    repeats_passes: bool = False
    """Whether it warms up and repeats passes, or steps, until `measuring` is content."""

    # How a study and a report treat it.
    in_studies: bool = True
    compared: bool = True
    """Whether the speeds of its cells are compared."""
    shown_by: str = ""
    """The kind of experiment that alone shows its figures; empty: all that compare speeds."""
    unpredicted: str = ""
    """Why the planner says nothing of it; empty: it does."""
    usd_per_units: int = 1_000_000
    """So many units a price is given for."""
    verb: str = "Run"
    form_title: str | None = None
    """The name on its button in a form; None: a form does not offer it."""
    hidden_fields: tuple[str, ...] = ()
    """Fields that a study file cannot set, because an experiment does."""
