"""What the documents point at exists, and the version is one."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_the_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == version


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


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


def _extra(name: str, extras: dict[str, list[str]]) -> list[str]:
    """What an extra asks for, extras that it names of this project itself included."""
    names: list[str] = []
    for item in extras[name]:
        own = re.fullmatch(r"rankwise\[([\w,-]+)\]", item)
        names += [found for part in own[1].split(",") for found in _extra(part, extras)] if own else [item]
    return names
