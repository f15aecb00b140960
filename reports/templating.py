"""Jinja as the report and the comparisons of runs use it.

text = template_environment().get_template("report.md.j2").render(context)
"""

from pathlib import Path
from typing import TYPE_CHECKING

from reports.text import escaped, plural, prose

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def template_environment() -> "Environment":
    """Return an environment in which unknown names are errors; nothing is escaped for HTML by itself."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(escaped=escaped, plural=plural, prose=prose)
    return environment


def template_source(name: str) -> str:
    """A file beside the templates, as it is."""
    return template_environment().loader.get_source(template_environment(), name)[0]  # type: ignore[union-attr]
