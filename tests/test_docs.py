"""Links, anchors, index and make targets of the documents exist; README, changelog and pins agree with the project."""

import ast
import builtins
import functools
import re
import shlex
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from configs.common.execution import Layout
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.prediction import Prediction
from configs.spec.measuring import Measuring
from configs.spec.objectives import Objectives
from configs.spec.study import KINDS, ForecastSpec, ModelSpec, StudySpec
from configs.targets.resources import Container, NodeLink
from configs.targets.ssh_host import SshHost
from configs.workloads import STUDIED
from configs.workloads.script import ScriptWorkload
from engine.planner.families import READERS
from flows.cli.main import app
from flows.cli.plan.study import correction_text

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "engine", "flows", "reports", "slurm", "tasks")
FIELDS_OF_SCRIPTS = "how-to/own-program.md"
OF_OTHER_LIBRARIES = {"DistributedConfig", "TrainingArguments"}
"""Classes of transformers that pages name and no module imports by a line of its own."""
DOCUMENTS = [
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.md")]
    if ".venv" not in path.parts
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    missing = [name for name in targets if "://" not in name and not (document.parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_are_headings(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text())
    missing = [
        f"{name}#{anchor}"
        for name, anchor in links
        if "://" not in name and anchor not in _anchors(document.parent / name if name else document)
    ]
    assert not missing


def _anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, punctuation dropped, spaces as hyphens."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_source_files_exist(document: Path) -> None:
    """Files of the packages, and modules that are run: `engine/worker.py`, `python -m slurm.launch`."""
    text = document.read_text()
    packages = "benchmarks|configs|engine|flows|reports|slurm|tasks|tests"
    paths = re.findall(rf"`((?:{packages})/[\w/.-]+\.\w+)`", text)
    paths += [name.replace(".", "/") + ".py" for name in re.findall(rf"python -m ((?:{packages})[\w.]*)", text)]
    run = re.findall(r"^[^#\n]*pytest ([^`\n]*)", text, re.MULTILINE)  # headings of the walk-through quote what was
    paths += [word for words in run for word in re.findall(r"\btests/[\w/.]+", words)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_import_what_the_packages_have(document: Path) -> None:
    packages = "benchmarks|configs|engine|flows|reports|slurm|tasks"
    imports = re.findall(rf"^\s*from ((?:{packages})[\w.]*) import (\(.*?\)|[^\n]*)", document.read_text(), re.M | re.S)
    missing = []
    for module, names in imports:
        path = ROOT / module.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        own = set(re.findall(r"\w+", source.read_text())) | {each.stem for each in path.glob("*")}
        wanted = re.sub(r"#.*| as \w+", "", names).strip("()").replace("\n", ",").split(",")
        missing += [f"{module}.{name.strip()}" for name in wanted if name.strip() and name.strip() not in own]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_have_the_options_that_they_name(document: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", document.read_text())
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [command for block in blocks for line in block.splitlines() for command in re.split(r"[;|&]+ ?", line)]
    found = [re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*rankwise ([a-z].*)", line) for line in lines]
    assert [words[1] for words in found if words and unknown_options(words[1].split())] == []


def test_commands_that_are_named_in_passing_exist() -> None:
    """In sentences of documents, comments of shipped studies, and docstrings and messages of the packages."""
    files = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which tells of names that were changed
    files += [*ROOT.glob("configs/studies/*.yaml"), ROOT / "prefect.yaml"]
    files += [path for package in PACKAGES for ending in ("py", "in") for path in (ROOT / package).rglob(f"*.{ending}")]
    unknown = []
    for path in files:
        for code in re.findall(r"`(?:sudo )?rankwise\s+([a-z][^`]*)`", path.read_text()):
            words = re.split(r"\[?-- ", code)[0].split()
            if is_unknown(words) or unknown_options(words):
                unknown.append(f"{path.relative_to(ROOT)}: {' '.join(code.split())}")
    assert unknown == []


@functools.cache
def command_line() -> Any:
    """The command `rankwise` with its groups; to build it takes a tenth of a second."""
    return typer.main.get_command(app)


def is_unknown(words: list[str]) -> bool:
    """Whether a command line names a command, or one of a group of commands, that there is not."""
    command = command_line()
    for word in words:
        group = getattr(command, "commands", {})
        if word not in group:
            return bool(group) and re.fullmatch(r"[a-z0-9-]+", word) is not None
        command = group[word]
    return False


def unknown_options(words: list[str]) -> set[str]:
    """Options of a command line that its command does not have."""
    command = command_line()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    if "--help" in words or "--version" in words:
        return set()
    return {word.strip("[]").split("=")[0] for word in words if word.strip("[]").startswith("--")} - known


def test_the_index_links_every_page_once() -> None:
    index = ROOT / "docs" / "README.md"
    links = Counter((index.parent / name).resolve() for name in re.findall(r"\]\(([^)#\s]+)\)", index.read_text()))
    generated = set(ROOT.glob("docs/examples/*/*.md"))
    pages = set(ROOT.glob("docs/**/*.md")) - {index} - generated
    assert {page: links[page] for page in pages if links[page] != 1} == {}


def test_troubleshooting_quotes_messages_that_are_printed() -> None:
    """In the first column of each table; `...`, `<host>` and numbers stand for what varies."""
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    symptoms = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    quotes = [quote for symptom in symptoms for quote in re.findall(r"`([^`]+)`", symptom)]
    printed = _printed()
    unknown = []
    for quote in quotes:
        fragments = [piece.strip() for piece in re.split(r"\.\.\.|<\w+>|\b\d[\d.]*", quote)]
        if len(max(fragments, key=len)) >= 8 and not all(fragment in printed for fragment in fragments):
            unknown.append(quote)
    assert unknown == []


def _printed() -> str:
    """Every text of the packages' source and of the scripts that users run."""
    texts = [(ROOT / "Makefile").read_text()]
    for package in PACKAGES:
        texts += [path.read_text() for path in (ROOT / package).rglob("*.in")]
        for path in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            texts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(texts)


def test_every_field_of_a_study_is_in_its_reference() -> None:
    """The fields of a script workload are in the guide of their own."""
    reference, guide = ((ROOT / "docs" / name).read_text() for name in ("reference/study-file.md", FIELDS_OF_SCRIPTS))
    models: list[type[BaseModel]] = [StudySpec, ModelSpec, ForecastSpec, Measuring, Objectives, Layout, SshHost]
    models += [Container, NodeLink, *(model for kinds in KINDS.values() for model in kinds.values())]
    hidden = {name for known in STUDIED.values() for name in known.hidden_fields}
    missing = {
        f"{model.__name__}.{name}"
        for model in models
        for name in model.model_fields.keys() - hidden
        if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", guide if model is ScriptWorkload else reference)
    }
    assert missing == set()


SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "Top level": (StudySpec,),
    "Targets": tuple(KINDS["targets"].values()),
    "Prompts": tuple(KINDS["workload"][kind] for kind in ("generate", "seq2seq", "encode")),
    "Training": (KINDS["workload"]["train"],),
    "Serving": (KINDS["workload"]["serve"],),
    "Measuring rules": (Measuring,),
}
"""Headings of the study file's reference, and whose fields the tables below them have."""


def test_defaults_in_the_reference_of_a_study_are_those_of_the_fields() -> None:
    """Of numbers, values in backticks and `none` in the last column; a sentence there is left to the reader."""
    text = (ROOT / "docs" / "reference" / "study-file.md").read_text()
    compared, wrong = 0, []
    for heading, models in SECTIONS.items():
        section = re.split(r"^##+ ", text.partition(f"# {heading}\n")[2], flags=re.MULTILINE)
        tables = section[0] + (section[1] if heading == "Targets" else "")  # those below "Devices"
        for line in re.findall(r"^\| `.* \|$", tables, re.MULTILINE):
            first, *_, last = line.strip("| ").split(" | ")
            names, values = re.findall(r"`(\w+)`", first), last.split(", ")
            for name, value in zip(names, values, strict=False) if len(names) == len(values) else ():
                known = [model.model_fields[name].get_default() for model in models if name in model.model_fields]
                shown = _shown_default(value)
                if known and shown is not NotImplemented:
                    compared += 1
                    empty = [default for default in known if not default or isinstance(default, BaseModel)]
                    is_right = bool(empty) if shown is None else shown in known or all(each is None for each in known)
                    wrong += [] if is_right else [f"{name}: {value}"]
    assert compared >= 50
    assert wrong == []


def _shown_default(value: str) -> Any:
    """What a cell of a table of defaults says; NotImplemented: a sentence."""
    if value == "none":
        return None
    if re.fullmatch(r"[\d.e-]+", value):
        return float(value)
    written = re.fullmatch(r"`([\w.]+)`", value)
    return {"true": True, "false": False}.get(written[1], written[1]) if written else NotImplemented


def test_every_field_of_an_experiment_is_in_the_row_of_its_kind() -> None:
    """Its own, that is, beside `kind`, `models` and `base`; weak scaling has the fields of strong scaling."""
    reference = (ROOT / "docs" / "reference" / "study-file.md").read_text()
    rows = {line.split("`")[1]: line for line in reference.splitlines() if re.match(r"\| `[a-z]+` \| \w.*\? ", line)}
    missing = {
        f"{kind}.{name}"
        for kind, model in KINDS["experiments"].items()
        for name in model.model_fields.keys() - {"kind", "models", "base"}
        if not re.search(rf"`[^`]*\b{name}\b[^`]*`", rows["strong" if kind == "weak" else kind].partition("? ")[2])
    }
    assert missing == set()


def test_every_file_of_a_run_folder_is_in_its_page() -> None:
    tree = (ROOT / "docs" / "reference" / "run-folder.md").read_text().split("```")[1]
    parts = [getattr(RunPaths(Path()), name) for name, kind in vars(RunPaths).items() if isinstance(kind, property)]
    names = {str(part.folder if isinstance(part, RunPaths) else part) for part in parts}
    assert {name for name in names if not re.search(rf"(^|\s){re.escape(name)}[/\s,]", tree)} == set()


def test_files_that_ranks_leave_beside_a_record_are_in_the_page_of_run_folders() -> None:
    tree, parts = (ROOT / "docs" / "reference" / "run-folder.md").read_text().split("```")[1], JobPaths(Path("job"))
    left = (parts.completions, parts.trace, parts.perf_text, parts.nsys_report, parts.flight_recorder)
    names = [path("r0-a1", 0).name.removeprefix("r0-a1").replace("rank_0", "rank_<r>") for path in left]
    assert [name for name in names if name not in tree] == []


def test_variables_of_the_environment_that_messages_name_are_in_a_page() -> None:
    """Those of Rankwise and of the hub."""
    pages = "\n".join(path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md")
    named = set(re.findall(r"\b((?:RANKWISE|HF)_[A-Z_]+) is set\b|\b[Ss]et ((?:RANKWISE|HF)_[A-Z_]+)", _printed()))
    assert {name for names in named for name in names if name not in pages} == set()


def test_every_extra_is_in_the_page_of_installation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = (ROOT / "docs" / "how-to" / "install.md").read_text().partition("| extra | adds |")[2].partition("\n\n")[0]
    assert {name for name in extras if f"`{name}`" not in rows} == set()


def test_the_correction_of_a_plan_is_quoted_as_it_is_printed() -> None:
    page = " ".join((ROOT / "docs" / "explanation" / "calibration.md").read_text().split())
    pattern = r"`corrected: time x (\S+) \((\S+) to (\S+) by cell\), from (\d+) records of this machine`"
    (found,) = re.findall(pattern, page)
    times, records = [float(value) for value in found[:3]], int(found[3])
    line = correction_text([Prediction(correction=each, learnt_from=records) for each in times])
    assert f"`{line}`" in page


def test_the_families_of_the_planner_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "models.md").read_text().partition("## Families")[2]
    rows = [line.split(" | ")[1].strip(" |") for line in page.splitlines() if re.match(r"\| [a-z]\w+ \| ", line)]
    listed = [name for row in rows for name in row.split(", ") if name != "`model_type`"]
    assert sorted(listed) == sorted(READERS)


def test_calls_in_sentences_are_of_classes_that_there_are() -> None:
    """`ComparedLatency("latency_seconds", ...)`: of this project, of Python or of a library that a module names."""
    source = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    there = set(re.findall(r"^\s*class (\w+)|\bimport (?:.*, )?([A-Z]\w+)", source, re.MULTILINE))
    known = {name for names in there for name in names} | set(dir(builtins)) | OF_OTHER_LIBRARIES
    documents = [path for path in DOCUMENTS if "measurements" not in path.parts and path.name != "CHANGELOG.md"]
    calls = {(path.name, name) for path in documents for name in re.findall(r"`([A-Z][a-z]\w*)\(", path.read_text())}
    assert {call for call in calls if call[1] not in known} == set()


def test_modules_name_pages_that_exist() -> None:
    for package in ("benchmarks", "configs", "engine", "flows", "reports", "slurm", "tasks"):
        for path in (ROOT / package).rglob("*.py"):
            pages = re.findall(r"docs/[\w/-]+\.md", path.read_text())
            assert [page for page in pages if not (ROOT / page).exists()] == [], path


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == version


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    ("target", "values", "words"),
    [
        ("study", ["STUDY=my studies/a.yaml", "RUNS=/data/my runs"], ["my studies/a.yaml", "--runs", "/data/my runs"]),
        ("report", ["RUN=my runs/a"], ["my runs/a"]),
        ("report", ["RUNS=my runs"], ["my runs/quickstart"]),
        ("test-faults", ["KEEP=my runs"], ["--runs", "my runs"]),
        ("bench-kernels", ["AGAINST=my checkout", "ARGS=-a b"], ["my checkout", "-a", "b"]),
        ("gpu-rehearsal", ["OUT=my results"], ["--out", "my results"]),
    ],
)
def test_paths_that_make_gets_may_have_spaces(target: str, values: list[str], words: list[str]) -> None:
    command = ["make", "--no-print-directory", "--dry-run", f"--directory={ROOT}", target, *values]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shlex.split(printed.splitlines()[-1])[-len(words) :] == words


def test_everything_that_is_required_is_pinned() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*required["dependencies"], *_extra("dev", required["optional-dependencies"])]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = {re.split(r"[<>=!\[; ]", name)[0].lower().replace("_", "-") for name in names}
    assert wanted <= pinned, wanted - pinned


def test_every_nightly_test_is_listed_with_the_defect_that_it_finds() -> None:
    """And nothing else is: a test that came back into CI, or is gone, has no row."""
    functions = (
        node
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and any("mark.nightly" in ast.unparse(each) for each in node.decorator_list)
    )
    table = (ROOT / "docs" / "reference" / "testing.md").read_text().partition("## Nightly tests")[2]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and all(row) for row in rows)
    listed = {name for row in rows for name in re.findall(r"`(test_\w+)`", row[0])}
    assert listed == {node.name for node in functions}


def _extra(name: str, extras: dict[str, list[str]]) -> list[str]:
    """What an extra asks for, extras that it names of this project itself included."""
    names: list[str] = []
    for item in extras[name]:
        own = re.fullmatch(r"rankwise\[([\w,-]+)\]", item)
        names += [found for part in own[1].split(",") for found in _extra(part, extras)] if own else [item]
    return names


EXAMPLES = ROOT / "docs" / "examples"
SIX = ("quickstart", "compression", "openllama", "two_nodes", "bandwidth", "strategies")
FORMS = ("report.md", "appendix.md", "report.html", "report.json", "cells.csv")


def test_the_six_examples_have_all_forms_and_are_small() -> None:
    missing = [f"{name}/{form}" for name in SIX for form in FORMS if not (EXAMPLES / name / form).is_file()]
    assert missing == [] and (EXAMPLES / "two_nodes" / "paper.pdf").is_file()
    files = [path for name in SIX for path in (EXAMPLES / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000


@pytest.mark.parametrize("name", SIX)
def test_the_short_form_opens_with_a_decision_of_at_most_six_sentences(name: str) -> None:
    lines = (EXAMPLES / name / "report.md").read_text().splitlines()
    sentences = [line for line in lines if line.startswith("> **")]
    assert 1 <= len(sentences) <= 6 and re.match(r"> \*\*(Run|Train) ", sentences[0])
    if name == "quickstart":
        assert len(lines) <= 120
