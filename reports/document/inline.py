"""Inline Markdown as tables and sentences of the report hold it (code, emphasis, escapes), as HTML or plain text.

Every character that comes out is escaped for its form, whatever the text says: names and logs are hostile.
"""

import re
from collections.abc import Iterator
from html import escape, unescape

from reports.document.structure import Markdown
from reports.text import prose

_TOKEN = re.compile(
    r"\\(?P<char>.)|`(?P<code>[^`]*)`|(?P<bold>\*\*)|(?P<entity>&(?:lt|gt|amp);)|(?P<text>[^\\`*&]+|.)", re.S
)


def inline_html(text: str, markdown: bool = True) -> str:
    """The text as HTML, safe between tags; `markdown`: whether marks in it have a meaning, other than backticks."""
    if not markdown:
        text = prose(text)
    parts, bold = [], False
    for kind, value in tokens(text):
        if kind == "bold":
            parts.append("</strong>" if bold else "<strong>")
            bold = not bold
        elif kind == "code":
            parts.append(f"<code>{escape(value, quote=True)}</code>")
        else:
            parts.append(escape(value, quote=True))
    return "".join(parts) + ("</strong>" if bold else "")


def section_html(text: str) -> str:
    """A text of a section: plain, or `Markdown`."""
    return inline_html(text, isinstance(text, Markdown))


def inline_plain(text: str) -> str:
    """The text without marks and escapes, as one line for a person or a program."""
    return "".join(value for kind, value in tokens(text) if kind != "bold")


def tokens(text: str) -> Iterator[tuple[str, str]]:
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup or "text"
        value = found.group(kind)
        if kind == "code":
            value = value.replace("\\|", "|")  # a bar in a table's code is escaped, alone of all characters
        yield ("text", unescape(value)) if kind == "entity" else (kind, value)
