"""A common rule-of-thumb table for the strategy, printed for comparison with the planner's choice.

    rule = rule_of_thumb(parameters=6.7e9, gpu_count=4)
    rule.words                      # "FSDP"
    rule.setup(base, 4)             # the same choice as a TrainingSetup, to be predicted like any other

The table uses only the model's size and the number of GPUs:

| parameters | GPUs | choice |
| --- | --- | --- |
| under 1 billion | 1 to 4 | DDP |
| | 5 and more | DDP; FSDP where DDP does not fit |
| 1 to under 10 billion | 1 to 2 | DDP with gradient checkpointing |
| | 3 to 8 | FSDP |
| | 9 and more | FSDP; ZeRO-3 where FSDP does not fit |
| 10 billion and more | 1 to 4 | FSDP with CPU offloading |
| | 5 to 8 | ZeRO-3 |
| | 9 and more | ZeRO-3 with ZeRO-Infinity (NVMe offloading) |

The usual form of the table has overlapping rows ("1-4" and "4+", "4-8" and "8+") and leaves 3 GPUs out. Here a count
that two rows name belongs to the row of fewer GPUs, 3 GPUs of a medium model go with the next row (the one before ends
at 2), and sizes are half open, so that exactly 1 billion is medium and exactly 10 billion large.
"""

from collections.abc import Callable
from dataclasses import dataclass

from configs.common.execution import Layout, Strategy
from configs.workloads.train import Offload
from engine.planner.setup import Checkpointing, TrainingSetup, precision_for

_SMALL_BELOW, _LARGE_FROM = 1e9, 10e9


@dataclass(frozen=True)
class Rule:
    """A row's choice. `otherwise` is used if the first does not fit."""

    words: str
    strategy: Strategy
    checkpointing: Checkpointing = "none"
    offload: Offload = "none"
    otherwise: "Rule | None" = None

    def setup(self, base: TrainingSetup, gpu_count: int) -> TrainingSetup:
        """Return the choice with all other fields of the base setup.

        Data parallel over all GPUs; the base's micro-batch and accumulation are unchanged.
        """
        alone = gpu_count == 1 and self.strategy == "ddp"
        strategy: Strategy = "none" if alone else self.strategy
        return base.replace(
            layout=Layout(dp=gpu_count, strategy=strategy),
            checkpointing=self.checkpointing,
            offload=self.offload,
            precision=precision_for(strategy, base.precision),
        )


_DDP = Rule("DDP", "ddp")
_FSDP = Rule("FSDP", "fsdp")
_ZERO3 = Rule("DeepSpeed ZeRO-3", "zero3")
# Largest number of GPUs of a row (None: no limit), and its choice.
_SMALL = ((4, _DDP), (None, Rule("DDP", "ddp", otherwise=_FSDP)))
_MEDIUM = (
    (2, Rule("DDP with gradient checkpointing", "ddp", checkpointing="full")),
    (8, _FSDP),
    (None, Rule("FSDP", "fsdp", otherwise=_ZERO3)),
)
_LARGE = (
    (4, Rule("FSDP with CPU offloading", "fsdp", offload="cpu")),
    (8, _ZERO3),
    (None, Rule("DeepSpeed ZeRO-3 with ZeRO-Infinity", "zero3", offload="nvme")),
)


def rule_of_thumb(parameters: float, gpu_count: int, fits: Callable[[Rule], bool] | None = None) -> Rule:
    """Return the table's choice. `fits` decides between a row's two; without it the first is used.

    Raises ValueError for a count below 1.
    """
    if gpu_count < 1:
        raise ValueError(f"gpu_count: {gpu_count} is not a number of GPUs; use at least 1")
    rows = _SMALL if parameters < _SMALL_BELOW else _MEDIUM if parameters < _LARGE_FROM else _LARGE
    rule = next(rule for most, rule in rows if most is None or gpu_count <= most)
    if rule.otherwise is not None and fits is not None and not fits(rule):
        return rule.otherwise
    return rule
