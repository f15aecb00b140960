"""One point of a grid: from a draft of its cell to the cell, with what is wrong or refused noted.

builder = PointBuilder(study, inputs, count_prompts)
builder.cells, builder.problems      # all so far
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError

from configs.common.booleans import boolean_problems
from configs.common.execution import Dtype, Layout
from configs.plans.plan import CellPoint, PlannedModel, RefusedPoint
from configs.plans.points.refusals import refusal
from configs.spec.alternatives import model_at, without_alternatives
from configs.spec.cell import Cell
from configs.spec.drafts import Draft, override
from configs.spec.experiments import Overrides
from configs.spec.placement import placed
from configs.spec.study import StudySpec, field_problem
from configs.targets.target import EndpointTarget, Target
from configs.workloads import STUDIED
from configs.workloads.prompted import PromptedWorkload

_INPUT_FIELDS = tuple(dict.fromkeys(field for known in STUDIED.values() for field in known.input_fields))
_NODES: TypeAdapter[int] = TypeAdapter(PositiveInt)
_DTYPE: TypeAdapter[Dtype] = TypeAdapter(Dtype)

_COMPARING = ("strong", "weak", "sweep", "optimization")
"""Kinds of experiments that compare the throughput of cells."""

CountPrompts = Callable[[PromptedWorkload], int]
"""How many prompts a workload selects, its inputs already replaced."""


def _without_effect(cell: Cell) -> dict[str, str]:
    """Fields of a cell's workload that are set and do nothing -> what they would need."""
    work = cell.workload
    return {**work.without_effect, **(work.server_only if cell.engine == "endpoint" else {})}


@dataclass
class PointBuilder:
    """Collects cells and problems while the experiments are walked."""

    study: StudySpec
    inputs: dict[str, str]
    count_prompts: CountPrompts
    cells: dict[str, Cell] = field(default_factory=dict)
    problems: dict[str, None] = field(default_factory=dict)
    """In the order in which they were found, each once."""
    refused: list[RefusedPoint] = field(default_factory=list)

    def refused_points(self, where: str, points: list[CellPoint]) -> tuple[RefusedPoint, ...]:
        """What the last experiment's grid could not have; a grid of nothing else is a problem of the study."""
        refused, self.refused = tuple(self.refused), []
        if refused and not points:
            for reason in dict.fromkeys(item.reason for item in refused):
                self.note_problem(f"{where}: no point can be measured: {reason}")
        return refused

    def note_same_cells(self, where: str, points: list[CellPoint]) -> None:
        """Note points that would compare a measurement with itself: one cell is measured once."""
        labels: dict[str, str] = {}
        for point in points:
            if point.cell not in labels:
                labels[point.cell] = point.label
                continue
            first = labels[point.cell]
            what = "is given twice" if first == point.label else f"is the same cell as {first}"
            self.note_problem(f"{where}: {point.label} {what}. Leave one of the two out")

    def note_unfilled_batch(self, where: str, chosen: Overrides, points: list[CellPoint]) -> None:
        """Note points that are told apart by a batch that none of their replicas gets."""
        nested = chosen.get("workload")
        names = {name.removeprefix("workload.") for name in chosen} | set(nested if isinstance(nested, dict) else ())
        for cell in (self.cells[point.cell] for point in points if "batch_size" in names):
            try:
                cell.workload.check_batch(cell.layout.dp)
            except ValueError as error:
                self.note_problem(f"{where}: {error}")

    def note_without_figures(self, where: str, kind: str, points: list[CellPoint]) -> None:
        """Note an experiment that compares the throughput of cells which have none."""
        shown_by = [STUDIED[self.cells[point.cell].workload.kind].shown_by for point in points]
        if kind in _COMPARING and points and all(shown_by):
            work = self.cells[points[0].cell].workload.kind
            self.note_problem(
                f"{where}.kind: got {kind}, which shows no figure of a {work} workload. Use `kind: {shown_by[0]}`"
            )

    def note_without_effect(self) -> None:
        """Note a problem for each value of a workload that is set and does nothing in any cell of its kind."""
        written = {name: path for path, name in self.inputs.items()}
        works = [(cell.workload, _without_effect(cell)) for cell in self.cells.values()]
        # Values as they are shown: a mapping has no hash.
        idle = {
            (work.kind, name, f"{getattr(work, name)}"): what for work, found in works for name, what in found.items()
        }
        names = {(kind, name) for kind, name, _ in idle}
        used = {
            (kind, name, f"{getattr(work, name)}")
            for work, found in works
            for kind, name in names
            if work.kind == kind and name not in found
        }
        for kind, name, value in [place for place in idle if place not in used]:
            what = idle[kind, name, value]
            shown = written.get(value, value)
            self.note_problem(f"workload.{name}: {shown} has no effect without {what}. Leave it out, or set that")

    def draft(self, model: PlannedModel | None, target: Target) -> Draft:
        """Return a draft of the fields that the study gives all cells."""
        return {
            "model": model.identity if model else None,
            "workload": self.study.workload.model_dump(),
            "layout": self.study.layout.model_dump(),
            "dtype": self.study.dtype,
            "engine": "endpoint" if isinstance(target, EndpointTarget) else self.study.engine,
            "target": target.name,
            "cores_per_rank": target.cores_per_rank,
            "env": dict(target.env),
        }

    def point(
        self,
        where: str,
        draft: Draft,
        values: dict[str, Any],
        label: str,
        baseline: bool = False,
        refusable: bool = False,
    ) -> list[CellPoint]:
        """One point, or none and a problem noted; of a grid that may be refused points, none and the reason kept."""
        reason = refusal(draft) if refusable else None
        if reason is not None:
            self.refused.append(RefusedPoint(label=label, values=values, reason=reason))
            return []
        cell = self.cell(where, draft)
        if cell is None:
            return []
        self.cells.setdefault(cell.key, cell)
        return [CellPoint(cell=cell.key, values=values, label=label, baseline=baseline)]

    def cell(self, where: str, draft: Draft) -> Cell | None:
        """The cell of a draft, its inputs by their names in the folder; None, and a problem noted, if it is wrong."""
        work = draft["workload"] = {**draft["workload"]}
        for name in _INPUT_FIELDS:
            if isinstance(work.get(name), str):
                work[name] = self.inputs.get(work[name], work[name])
            elif isinstance(work.get(name), list | tuple):
                work[name] = [self.inputs.get(item, item) if isinstance(item, str) else item for item in work[name]]
        try:
            cell = Cell.model_validate(draft)
            if self._has_boolean(f"{where}: ", draft, cell):
                return None
            if isinstance(cell.workload, PromptedWorkload) and cell.workload.num_prompts is None:
                count = self.count_prompts(cell.workload) if cell.workload.prompts else 0
                # A shorter file is repeated: a batch of 16 measured on a file of 4 would be a batch of 4.
                work["num_prompts"] = max(count, cell.workload.batch_size * cell.layout.dp)
                cell = Cell.model_validate(draft)
            cell.workload.check_batch()  # of one replica: scaling and layouts may share a batch out
            cell.workload.check_warmup(self.study.measuring.warmup)
            return placed(cell, self.target(cell.target), cell.nodes if draft.get("nodes") is not None else None)
        except ValidationError as error:
            self.note_invalid(where, error, draft)
        except ValueError as error:
            self.note_problem(f"{where}: {error}")
        return None

    def note_invalid(self, where: str, error: ValidationError, draft: Draft) -> None:
        """Note what pydantic refused of a draft, each by its dotted field."""
        for detail in without_alternatives(error.errors(include_url=False), draft):
            # The union's tag stands second in the location of a workload's field.
            kind = next((str(item) for item in detail["loc"] if item in STUDIED), None)
            location = [str(item) for item in detail["loc"] if item not in STUDIED]
            if error.title == Layout.__name__:
                location.insert(0, "layout")
            model = Layout if location[:1] == ["layout"] else STUDIED[kind].model if kind is not None else Cell
            name = next((item for item in reversed(location) if not item.isdecimal()), "")
            path = location[1:] if location[:1] in (["layout"], ["workload"]) else location
            text = field_problem(detail, name, model_at(model, path, detail["alternative"]))
            field = ".".join(location)
            named = not field or text.startswith(f"{field}.")  # a workload's own checks name its field
            self.note_problem(f"{where}: {text}" if named else f"{where}: {field}: {text}")

    def target(self, name: str) -> Target:
        """Return the study's target of this name."""
        return next(target for target in self.study.targets if target.name == name)

    def settled(self, where: str, draft: Draft) -> bool:
        """Make the values of workload and nodes those of their fields, as those of an override need not be: "8" is 8.

        False, and the problem noted, where one is wrong: nothing can be computed from it.
        """
        work = draft["workload"]
        try:
            settled = STUDIED[work["kind"]].model.model_validate(work)
            _DTYPE.validate_python(draft["dtype"])
            nodes = None if draft.get("nodes") is None else _NODES.validate_python(draft["nodes"])
        except ValidationError:
            self.point(where, draft, {}, where)
            return False
        if self._has_boolean(f"{where}: ", draft, {"workload": settled, "nodes": nodes}):
            return False
        draft["workload"] = settled.model_dump()
        if nodes is not None:
            draft["nodes"] = nodes
        return True

    def _has_boolean(self, where: str, given: Mapping[str, Any], made: BaseModel | Mapping[str, Any]) -> bool:
        """Whether numbers are given as true or false, each noted as a problem."""
        problems = boolean_problems(given, made)
        for problem in problems:
            self.note_problem(f"{where}{problem}")
        return bool(problems)

    def prompts_in_file(self, draft: Draft) -> int | None:
        """Return how many prompts the draft selects of its file; None without one."""
        work = draft["workload"]
        if not isinstance(work.get("prompts"), str):
            return None
        fields = {name: work.get(name) for name in ("variant", "limit")}
        return self.count_prompts(PromptedWorkload(prompts=self.inputs.get(work["prompts"], work["prompts"]), **fields))

    def set_prompts(self, draft: Draft, full: int, random: int) -> None:
        """Set a number of prompts that is not given: the file's, at least a full batch; without a file `random`."""
        work = draft["workload"]
        if STUDIED[work["kind"]].takes_prompts and work.get("num_prompts") is None:
            available = self.prompts_in_file(draft)
            work["num_prompts"] = max(available, full) if available else random

    def override(self, draft: Draft, overrides: Overrides, where: str) -> bool:
        """Set dotted fields of a draft; False, with the problems noted, where one does not exist."""
        problems = override(draft, overrides)
        for problem in problems:
            self.note_problem(f"{where}.{problem}")
        return not problems

    def note_problem(self, text: str) -> None:
        """Note a problem once."""
        self.problems[text] = None


def whole(value: object, default: int = 1) -> int:
    """A number of an override that is not validated yet; the default for what the cell's validation will refuse."""
    return value if isinstance(value, int) and value > 0 else default
