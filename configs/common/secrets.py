"""Secrets, by the one rule for all that is printed or kept: which variables hold one, and what is shown instead.

shown("HF_TOKEN", value)                                  # "(hidden)"
without_password("postgresql://a:b@host/db?x=1")          # "postgresql://host/db"
"""

import re
from urllib.parse import urlsplit

HIDDEN = "(hidden)"
# A whole word at the end of a part, so that TOKENIZERS_PARALLELISM is none.
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH_STRING)S?(_|$)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a variable's name looks like that of a secret."""
    return _SECRET.search(name) is not None


def shown_value(name: str, value: str) -> str:
    """Return a variable's value as it may be printed or kept."""
    return HIDDEN if is_secret(name) else value


def without_password(url: str) -> str:
    """Return a URL without user, password and query, any of which may hold a secret. Raises ValueError for no URL."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
