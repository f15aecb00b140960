"""`rankwise examples`: the studies that come with Rankwise, listed, or one of them copied to be run and edited.

    rankwise examples
    rankwise examples quickstart --out studies

A copy stands on its own: prompts and model folders that the study names are copied with it, and the references are
changed to where the copies lie. Its cells have the keys of the original, for these follow from the files' content.

The first line of a shipped study is a comment saying what it shows, the second one how many cells it has and how long
it takes.
"""

import re
import shutil
from pathlib import Path
from shlex import quote

from configs.common.base import WrongArgument, sha256_of_file, write_atomically
from configs.common.files.project_files import shipped_studies
from configs.common.files.reading import brief, read_text
from configs.spec.study import suggestion
from flows.cli.tables import print_table

_HEADER = re.compile(r"# (?P<shows>.+)\n# (?P<cells>\d+) cells, (?P<takes>.+)\.\n")
_MOVED = (("configs/studies/", ""), ("configs/models/", "models/"), ("../models/", "models/"))
"""How a reference in a shipped study reads in its copy: beside it lie prompts, and the folder `models`."""


def shipped_examples() -> dict[str, "re.Match[str]"]:
    """The shipped studies that are examples, by name, with what their header says: shows, cells, takes."""
    found = {name: _HEADER.match(read_text(path)) for name, path in shipped_studies().items()}
    return {name: header for name, header in found.items() if header is not None}


def print_examples() -> int:
    """One line for each example."""
    rows = [(name, header["cells"], header["takes"], header["shows"]) for name, header in shipped_examples().items()]
    print_table(("name", "cells", "takes", "shows"), rows, words=("name", "takes", "shows"))
    print("\nTo copy one and run it: rankwise examples quickstart, then rankwise run quickstart.yaml")
    return 0


def copy_example(name: str, folder: Path) -> int:
    """Copy a study and the files that it names into `folder`, which is created.

    Raises WrongArgument for an unknown name, ValueError for a file in the way that differs, OSError where nothing can
    be written.
    """
    known = shipped_examples()
    name = name.removesuffix(".yaml").replace("_", "-")
    if name not in known:
        raise WrongArgument(f"no example {brief(name)}{suggestion(name, list(known))}")
    source = shipped_studies()[name]
    text = read_text(source)
    copies = {folder / _moved(path): source.parent / path for path in _named_files(source.parent, text)}
    study = folder / source.name
    in_the_way = [path for path, original in copies.items() if path.exists() and not _same(path, original)]
    in_the_way += [study] if study.exists() and read_text(study) != _moved(text) else []
    if in_the_way:
        raise ValueError(f"{in_the_way[0]}: already exists and differs. Choose another folder with --out")
    for path, original in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(study, _moved(text))
    print(f"{study}: {known[name]['shows']}")
    for path in sorted({folder / _moved(named) for named in _references(source.parent, text)}):
        print(f"{path}: used by it")
    print(f"To run it: rankwise run {quote(str(study))}")
    return 0


def _moved(text: str) -> str:
    for before, after in _MOVED:
        text = text.replace(before, after)
    return text


def _references(base: Path, text: str) -> list[str]:
    """Files beside the study, and folders of shipped models, that the study names, as it writes them."""
    words = dict.fromkeys(re.findall(r"[\w./-]+", text))
    return [
        word
        for word in words
        if (base / word).suffix != ".yaml" and ((base / word).is_file() or (word.startswith("../models/")))
    ]


def _named_files(base: Path, text: str) -> list[str]:
    """Every file that a study needs, by its path as the study would write it."""
    files: list[str] = []
    for reference in _references(base, text):
        path = base / reference
        if path.is_dir():
            files += [f"{reference}/{file.relative_to(path)}" for file in path.rglob("*") if file.is_file()]
        else:
            files.append(reference)
    return files


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and sha256_of_file(one) == sha256_of_file(other)
