"""Joint report of several runs: comparison of nodes, their differences, and the best node for each goal.

    found = find_runs("runs/*")                         # folders, and what else the pattern named
    text = joined_report([load_comparable(RunPaths(folder)) for folder in found.folders])

A node is a target of a run, or one of its devices where its cells ran on several. Where two runs have a target of the
same name, each is a node of its own, named with its run folder, so that measurements of different machines or days
never flow into one figure. Cells are the same where they agree in everything but the target.
"""

import glob
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.common.base import content_hash, expanded
from configs.common.files.reading import PLAN_BYTES, read_json_object
from configs.plans.paths import RunPaths
from configs.spec.cell import Cell
from reports.decisions.cost import BILLING, CellCost, cell_cost, price_of, study_cost_table
from reports.decisions.nodes import (
    NodeCell,
    node_latency_table,
    node_memory_table,
    node_table,
    nodes_sentence,
    throughput_table,
    work_key,
    work_title,
)
from reports.decisions.spending import study_costs
from reports.decisions.wrong_answers import wrong_cells
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.names import model_title
from reports.reading.run_figures import RunFigures, run_figures
from reports.runs.compare import FIRST, OF_SINGLE
from reports.runs.compare_text import short_commit
from reports.runs.join_best import Contender, best_sentences
from reports.templating import template_environment
from reports.text import (
    UNKNOWN,
    Table,
    code,
    count,
    escaped,
    estimate_cell,
    fact_text,
    first_of,
    joined,
    number,
    percent,
)

_NAMED = 5
"""Cells with wrong answers that a sentence names."""


@dataclass(frozen=True)
class FoundRuns:
    """Run folders that a pattern names, and the paths that it names besides."""

    folders: tuple[Path, ...]
    others: tuple[str, ...]


def find_runs(patterns: Sequence[str]) -> FoundRuns:
    """The run folders that patterns such as `runs/*` name.

    A file in a run folder names it too, such as `runs/*/plan.json`, and so does a file of `rankwise benchmark`, by the
    folder beside it that its `run` holds. Raises ValueError where a pattern matches nothing, or no match is a run.
    """
    matches = sorted({match for one in patterns for match in _matches(one)})
    folders: dict[Path, Path] = {}
    others = []
    for match in map(Path, matches):
        folder = match if match.is_dir() else _run_of(match)
        if RunPaths(folder).plan.exists():
            folders.setdefault(folder.resolve(), folder)
        elif match.is_dir():
            others.append(str(match))
    if not folders:
        raise ValueError(f"--results {' '.join(patterns)}: names no run; a run folder has a plan.json")
    return FoundRuns(tuple(folders.values()), tuple(others))


def _matches(pattern: str) -> list[str]:
    """The paths that a pattern names, or the one of this very name. Raises ValueError where it names none."""
    path = expanded(pattern)
    found = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)
    if not found:
        raise ValueError(f"--results {pattern}: matches nothing; give run folders, such as --results 'runs/*'")
    return found


def _run_of(file: Path) -> Path:
    """The run folder that a file lies in, or that a file of `rankwise benchmark` names."""
    if file.suffix == ".json" and file.name.startswith("benchmark_results_"):
        named = read_json_object(file, PLAN_BYTES).get("run")
        if not isinstance(named, str) or Path(named).name != named:
            raise ValueError(f"{file}: run: got {named!r}, expected the name of a folder beside the file")
        return file.parent / named
    return file.parent


@dataclass(frozen=True)
class JoinedNode:
    """A target of a run, with its cells whose speed may be compared. wrong: keys of those with wrong answers."""

    name: str
    study: StudyResult
    figures: RunFigures
    target: str
    cells: tuple[NodeCell, ...]
    wrong: frozenset[str] = frozenset()

    @property
    def right(self) -> list[NodeCell]:
        """The cells that may be the best."""
        return [item for item in self.cells if item.result.key not in self.wrong]

    def facts(self, names: Sequence[str]) -> dict[str, set[str]]:
        """The named facts of the environments that its cells were measured in."""
        return self.figures.facts(names, [item.result.key for item in self.cells])


def nodes_of(studies: Sequence[StudyResult]) -> list[JoinedNode]:
    """Every target of every run that has cells to compare, named so that no two are alike."""
    places = [_places(study) for study in studies]
    times = Counter(name for place in places for name in place)
    labels = _labels([study.folder for study in studies])
    titles = _model_titles(studies)
    nodes = []
    for study, place, label in zip(studies, places, labels, strict=True):
        figures, wrong = run_figures(study, label), wrong_cells(study)
        for node, members in place.items():
            name = node if times[node] == 1 else f"{node} ({label})"
            results = [result for result in members if result.compared]
            if not results:
                continue
            target = results[0].cell.target
            cells = [NodeCell(name, replace(result, model=titles[result.cell.model or ""])) for result in results]
            nodes.append(JoinedNode(name, study, figures, target, tuple(cells), wrong))
    return nodes


def _places(study: StudyResult) -> dict[str, list[CellResult]]:
    """Cells by target, and by device where a target's ran on several; one without a figure stays with the first."""
    devices: dict[str, dict[str, None]] = {}
    for result in study.cells.values():
        devices.setdefault(result.cell.target, {}).update({result.device: None} if result.device else {})
    places: dict[str, list[CellResult]] = {}
    for result in study.cells.values():
        target, known = result.cell.target, list(devices[result.cell.target])
        name = f"{target} on {result.device or known[0]}" if len(known) > 1 else target
        places.setdefault(name, []).append(result)
    return places


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest end of each folder's path that no other folder has."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(each[-length:]) for each in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(folder) for folder in folders]


def _model_titles(studies: Sequence[StudyResult]) -> dict[str, str]:
    """One name for each model identity, and no name for two."""
    titles: dict[str, str] = {"": "no model"}
    for study in studies:
        for result in study.cells.values():
            titles.setdefault(result.cell.model or "", model_title(study.plan, result.cell.model))
    shared = Counter(titles.values())
    return {
        identity: title if shared[title] == 1 else f"{title} {content_hash(identity, digits=6)}"
        for identity, title in titles.items()
    }


def without_target(cell: Cell) -> str:
    """What cells have in common that are the same but for where they ran."""
    return content_hash(cell.model_dump(mode="json", exclude={"target"}))


def joined_report(studies: Sequence[StudyResult], others: Sequence[str] = ()) -> str:
    """The Markdown. `others`: paths that the pattern named and that are no runs.

    Raises ValueError where no run has a cell whose speed may be compared.
    """
    nodes = nodes_of(studies)
    if not nodes:
        raise ValueError(
            "the runs have no cells whose speed may be compared: those that keep answers are left out, and those whose "
            f"figures are {OF_SINGLE}"
        )
    cells = [item for node in nodes for item in node.cells]
    text = (
        template_environment()
        .get_template("joined.md.j2")
        .render(
            title=joined(dict.fromkeys(study.plan.study for study in studies)),
            nodes=nodes,
            studies=studies,
            best=[*best_sentences(_contenders(nodes)), *_wrong_sentences(nodes)],
            runs=runs_table(nodes),
            others=others,
            environment=nodes_environment_sentence(nodes),
            differences=nodes_environment_table(nodes),
            common=common_table(nodes),
            how=nodes_sentence(cells),
            latency=node_latency_table(cells),
            throughput=throughput_table(cells),
            memory=node_memory_table(cells),
            node_table=node_table(cells),
            costs=cost_table(nodes),
            spent=spending_table(nodes),
            billing=BILLING,
        )
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def runs_table(nodes: Sequence[JoinedNode]) -> Table:
    """Which node stands for what: run, target, when, with which code, on which hosts."""
    rows = []
    for node in nodes:
        hosts = sorted({host for item in node.cells for host in node.figures.cells[item.result.key].hosts})
        rows.append(
            (
                escaped(node.name),
                code(node.figures.name),
                escaped(node.target),
                (node.figures.started_at or UNKNOWN)[:16].replace("T", " "),
                short_commit(node.figures.commit) if node.figures.commit else UNKNOWN,
                escaped(", ".join(hosts)) or UNKNOWN,
                f"{sum(bool(item.result.completed) for item in node.cells)} of {len(node.cells)}",
            )
        )
    columns = ("node", "run", "target", "measured, UTC", "commit", "hosts", "cells with a figure")
    return Table(columns, tuple(rows), text_columns=6)


def nodes_environment_table(nodes: Sequence[JoinedNode]) -> Table | None:
    """The facts in which the nodes differ, a column for each node; None where they differ in nothing."""
    names = _differing(nodes)
    facts = [node.facts(names) for node in nodes]
    rows = [(code(name), *(fact_text(*known[name]) for known in facts)) for name in names]
    return Table(("what", *(escaped(node.name) for node in nodes)), tuple(rows), len(nodes) + 1) if rows else None


def nodes_environment_sentence(nodes: Sequence[JoinedNode]) -> str:
    """Whether nodes were measured alike."""
    names = _differing(nodes)
    rules = sorted({name for node in nodes for name in node.figures.rules})
    rules = [name for name in rules if len({node.figures.rules.get(name) for node in nodes}) > 1]
    measured = [node for node in nodes if any(item.result.completed for item in node.cells)]
    facts = _fact_names(nodes)
    unknown = [node.name for node in measured if not any(node.facts(facts).values())]
    text = "All nodes were measured in the same environment."
    if unknown:
        text = f"The environment of {joined(unknown)} is not known."
        if not names and len(measured) - len(unknown) > 1:
            text += " The others were measured in the same environment."
    if names:
        differ = f"The environments differ in {joined(names)}. No figure mixes nodes: each stands for one of them."
        text = f"{differ} {text}" if unknown else differ
    return text + (f" They were measured by different rules: {joined(rules)}." if rules else "")


def _fact_names(nodes: Sequence[JoinedNode]) -> list[str]:
    return sorted({name for node in nodes for flat in node.figures.environments.values() for name in flat or ()})


def _differing(nodes: Sequence[JoinedNode]) -> list[str]:
    names = _fact_names(nodes)
    facts = [known for node in nodes if any((known := node.facts(names)).values())]
    found = [name for name in names if any(known[name] != facts[0][name] for known in facts)]
    return sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def common_table(nodes: Sequence[JoinedNode]) -> Table | None:
    """Like for like: only the cells that every node has a figure for. None where there are none."""
    import numpy as np
    import pandas as pd

    throughput = pd.DataFrame([_medians(node) for node in nodes]).T.dropna()
    if throughput.empty:
        return None
    share = throughput.div(throughput.max(axis=1), axis=0)
    means, fastest = np.exp(np.log(share).mean()), share.eq(1).sum()
    rows = [
        (escaped(node.name), count(len(share)), count(fastest[place]), percent(means[place]))
        for place, node in enumerate(nodes)
    ]
    columns = ("node", "cells that every node has", "fastest in", "throughput over the fastest's, geometric mean")
    return Table(columns, tuple(rows))


def _medians(node: JoinedNode) -> dict[str, float]:
    """Median throughput of each cell of a node, by what the cell is but for its target."""
    values = {without_target(item.result.cell): item.result.estimate("throughput") for item in node.cells}
    return {cell: value.median for cell, value in values.items() if value is not None and value.median > 0}


def _contenders(nodes: Sequence[JoinedNode]) -> list[Contender]:
    found = []
    for node in nodes:
        for item in node.right:
            price = price_of(node.study, item.result)
            found.append(
                Contender(node.name, item.result, price.usd_per_hour * item.result.cell.nodes if price else None)
            )
    return found


def _wrong_sentences(nodes: Sequence[JoinedNode]) -> list[str]:
    """Which cells are not considered above, where there are any."""
    barred = [
        f"{item.node} with {item.result.name}" for node in nodes for item in node.cells if item.result.key in node.wrong
    ]
    if not barred:
        return []
    return [f"Left out, as their answers are wrong or their losses not finite: {first_of(barred, _NAMED)}."]


def cost_table(nodes: Sequence[JoinedNode]) -> Table | None:
    """What the work of each node costs at its cheapest, by model and work; None where no price is known."""
    priced: dict[str, list[tuple[str, Estimate, CellCost]]] = {}
    works: dict[str, set[str]] = {}
    for node in nodes:
        costs = [cell_cost(item.result, price_of(node.study, item.result)) for item in node.right]
        known = [(cost.usd_per_million, cost) for cost in costs if cost.usd_per_million]
        priced[node.name] = [(work_key(cost.result.cell), value, cost) for value, cost in known]
        for work, _, cost in priced[node.name]:
            works.setdefault(cost.result.model, set()).add(work)
    rows = []
    for name, found in priced.items():
        # A token of another work is no price to compare with.
        for model, work in dict.fromkeys((cost.result.model, work) for work, _, cost in found):
            alike = [(value, cost) for key, value, cost in found if (cost.result.model, key) == (model, work)]
            value, cheapest = min(alike, key=lambda pair: pair[0].median)
            assert cheapest.price is not None
            told = f"{model}, {work_title(cheapest.result.cell)}" if len(works[model]) > 1 else model
            rows.append(
                (
                    escaped(name),
                    escaped(told),
                    escaped(cheapest.result.name),
                    number(cheapest.usd_per_hour, 4),
                    estimate_cell(value),
                    escaped(cheapest.price.source),
                )
            )
    columns = (
        "node",
        "model",
        "cheapest cell",
        "USD an hour",
        "USD per million tokens or embeddings, median (interval)",
        "price from",
    )
    return Table(columns, tuple(rows), text_columns=3) if rows else None


def spending_table(nodes: Sequence[JoinedNode]) -> Table | None:
    """What each run cost, by target: dollars, hours and price of an hour; None where no launch left its times."""
    runs = {node.figures.name: node.study for node in nodes}
    costs = [(name, cost) for name, study in runs.items() for cost in study_costs(study)]
    return study_cost_table([cost for _, cost in costs], [name for name, _ in costs])
