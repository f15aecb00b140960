"""The one detector of secrets, for all that is printed, kept or passed on.

is_secret("HF_TOKEN")                                          # by a variable's name
holds_secret("DATABASE_URL", "postgresql://a:b@host/db")       # by its name or its value
shown_value("DATABASE_URL", "postgresql://a:b@host/db")        # "postgresql://(hidden)@host/db"
redacted("GET https://host/x?token=abc failed")                # "GET https://host/x?token=(hidden) failed"
excerpt(answer, 200)                                           # its first 200 characters, redacted
hide_in_error(error)                                           # the same for what an exception says

A value counts as a secret where its form says so: user and password in a URL, a parameter, a setting or an entry of a
dict that is named like a secret, an Authorization header, a private key, the tokens of well-known services. In text
also the values of this process's own variables that are named like secrets.
"""

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from configs.common.printable import shortened

HIDDEN = "(hidden)"
_WORDS = r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|AUTH_STRING|AUTHORIZATION|SIGNATURE"
# A whole word at the end of a part, so that TOKENIZERS_PARALLELISM is none.
_SECRET = re.compile(rf"({_WORDS})S?(_|$)|(^|_)(PASS|PAT|JWT)$", re.IGNORECASE)
_NO_SECRETS = {"PWD", "OLDPWD"}
# MAX_TOKENS=4096 is a count; of TOKEN, KEY or PASSWORD a number may be a secret.
_COUNTED = re.compile(r"(^|_)TOKENS(_|$)", re.IGNORECASE)
_COUNT = re.compile(r"\d{1,12}(\.\d{1,12})?[kmgb]?", re.IGNORECASE)
_FAR = 10_000
"""Characters behind a cut that are searched for secrets as well."""
_SHORTEST = 6
"""Shorter values of secret variables are not searched for in text: they would hide words."""
_NO_VALUE = ("/", "~", "./", "../", "$", "{", "<", "-", "%")
"""How a text begins that is the path of a secret, a placeholder for it, or the next option."""

_SAID_BESIDE_ARGS = ("strerror", "filename", "filename2", "reason")
"""Attributes from which errors of the system and of urllib make their text."""

# To the last @ before a path. A password may hold whatever SQLAlchemy takes, / too; but a port is none, nor is IPv6.
_USERINFO = re.compile(
    r"(?P<kept>[a-z][a-z0-9+.-]{1,20}://)(?![$({\[])"
    r"(?:[^\s/?#'\"<>]+|[^\s/?#@:'\"<>]{0,100}:(?!\d{1,5}/)[^\s@'\"<>]{1,200})@",
    re.IGNORECASE,
)
# name=value of a query, a connection string (libpq's and ADO's), or a setting; a number is a count (new_tokens=8).
_SETTING = re.compile(
    # Of a longer name the end counts: to look for its beginning takes the square of the text's length.
    r"(?P<kept>(?<![a-z0-9])(?:(?:api|access|account|private|secret|shared|subscription)[_-]?key|token|secret"
    r"|password|passwd|passphrase|pwd|credential|auth[_-]string|signature|sig)\s?=\s?)"
    r"(?!\(hidden\)|\d+\b)(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s&;,\"')<>{}\[\]$]{3,})",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(?P<kept>(?<!\S)--?(?:[a-z0-9]+[_-])*(?:token|api[_-]?key|secret|password|passwd)\s+)(?![-(])\S+", re.IGNORECASE
)
_SCHEMES = r"(?:bearer|basic|token|apikey|api-key|key|negotiate|sharedkey)"
_HEADER = re.compile(
    rf"(?P<kept>\b(?:authorization|x-api-key)[\"']?\s*[:=]\s*[\"']?(?:{_SCHEMES}\s+)?|\bbearer\s+)"
    rf"(?!\(hidden\)|{_SCHEMES}\s)[A-Za-z0-9._~+/=-]{{6,}}",
    re.IGNORECASE,
)
# Of a dict or of JSON. A `token` alone is one of text there, as is `pad_token`.
_NAME = (
    r"(?:[a-z0-9]{1,20}[_-]){0,4}(?:(?:api|access|account|private|secret|shared|subscription)[_-]?key"
    r"|(?:access|refresh|auth|id|session|bearer|api|hf)[_-]?token|secret|password|passwd|passphrase|credential)"
)
_ENTRY = re.compile(
    rf"(?P<kept>[\"']{_NAME}[\"']\s{{0,4}}:\s{{0,4}})(?:\"(?!\(hidden\))[^\"\n]+\"|'(?!\(hidden\))[^'\n]+')",
    re.IGNORECASE,
)
_FIELD = re.compile(_NAME, re.IGNORECASE)
# OPENAI_API_KEY, os.environ/OPENAI_API_KEY, env:KEY: where a program finds the secret.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|(os\.environ|env|ENV)[/:.\[]\S+")
_OPTION_NAME = re.compile(rf"--?{_NAME}", re.IGNORECASE)
# A JSON web token, with what stands before it in its word: to try each place of a word takes the square of its length.
_WEB_TOKEN = r"(?<![\w-])(?=[\w-]*?\beyJ[\w-]{8})[\w-]++\.eyJ[\w-]{8,}+\.[\w-]+"
# Forms of tokens: Hugging Face, AWS, GitHub, GitLab, OpenAI and others, Slack, Google, Prefect, JSON web tokens, PEM.
_TOKEN = re.compile(
    r"(?P<kept>)(?:\bhf_[A-Za-z0-9]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[opusr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{30,}"
    rf"|\bpn[ub]_\w{{20,}}|{_WEB_TOKEN}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*))",
    re.DOTALL,
)
_FORMS = (_TOKEN, _USERINFO, _HEADER, _ENTRY, _SETTING, _OPTION)


def is_secret(name: str) -> bool:
    """Return whether a variable's name looks like that of a secret."""
    return name.upper() not in _NO_SECRETS and _SECRET.search(name) is not None


def is_secret_value(name: str, value: str) -> bool:
    """Return whether a variable's value is a secret by its name; the number of a MAX_TOKENS counts something."""
    return is_secret(name) and not (_COUNTED.search(name) and _COUNT.fullmatch(value.strip()))


def holds_secret(name: str, value: str) -> bool:
    """Return whether a variable must not be kept or passed on, by its name or by the form of its value."""
    return is_secret_value(name, value) or _without_forms(value) != value


def shown_value(name: str, value: str) -> str:
    """Return a variable's value as it may be printed or kept."""
    return HIDDEN if is_secret_value(name, value) else redacted(value)


def redacted(text: str) -> str:
    """Return a text without secrets: those that their form gives away, and those of this process's environment."""
    for value in sorted(_own_secrets(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _without_forms(text)


def excerpt(text: str, max_characters: int) -> str:
    """Return the beginning of a text, redacted, with an ellipsis where it was cut.

    Secrets are hidden before the cut: half of one is not known any more. The rest of the text may be megabytes.
    """
    return shortened(redacted(text[: 4 * max_characters + _FAR]), max_characters)


def hide_in_error(error: BaseException) -> None:
    """Redact what an exception, and those that it came from, say; in place, so that their types stay."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [each for each in (one.__cause__, one.__context__, *one.args) if isinstance(each, BaseException)]
        one.args = tuple(redacted(each) if isinstance(each, str) else each for each in one.args)
        for name in _SAID_BESIDE_ARGS:
            text = getattr(one, name, None)
            if isinstance(text, str) and redacted(text) != text:
                setattr(one, name, redacted(text))


def without_password(url: str) -> str:
    """Return a URL without user, password and query, any of which may hold a secret. Raises ValueError for no URL."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def shown_url(url: str) -> str:
    """Return a URL as it may be printed: without user and password, other secrets hidden."""
    return redacted(url).replace(f"://{HIDDEN}@", "://")


def secret_fields(data: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted fields of nested data (as of YAML) whose text holds a secret.

    By its form, by the name of its field (`api_key: ...`), or by the option before it in a list (`--api-key`, `...`).
    """
    if isinstance(data, str):
        if _without_forms(data) != data:
            yield where
    elif isinstance(data, dict):
        for key, value in data.items():
            field = f"{where}.{key}" if where else str(key)
            *within, name = field.split(".")
            # Names of variables have a rule of their own (`is_secret`), whose message says more.
            named = _FIELD.fullmatch(name) is not None and within[-1:] not in (["env"], ["environment"])
            yield from _secret_value(value, field, named)
    elif isinstance(data, list | tuple):
        named = False
        for place, value in enumerate(data):
            yield from _secret_value(value, f"{where}.{place}", named)
            named = isinstance(value, str) and _OPTION_NAME.fullmatch(value) is not None


def _secret_value(value: Any, where: str, named: bool) -> Iterator[str]:
    """As `secret_fields`; named: what stands before the value says that it is a secret."""
    told = named and isinstance(value, str) and len(value) >= _SHORTEST
    if told and not value.startswith(_NO_VALUE) and not _VARIABLE.fullmatch(value):
        yield where
    else:
        yield from secret_fields(value, where)


def _without_forms(text: str) -> str:
    for form in _FORMS:
        text = form.sub(lambda match: f"{match['kept']}{HIDDEN}{'@' if match[0].endswith('@') else ''}", text)
    return text


def _own_secrets() -> set[str]:
    """Values of secret variables; the user name beside a password (`AUTH_STRING=user:password`) may be shown."""
    own = {value for name, value in os.environ.items() if is_secret_value(name, value)}
    own |= {value.partition(":")[2] for value in own if ":" in value}
    return {value for value in own if len(value) >= _SHORTEST and not value.startswith(("/", "~"))}
