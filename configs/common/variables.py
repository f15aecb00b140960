"""Environment variables that a study passes to its ranks: names that every shell takes, and no secrets.

checked_variables({"OMP_NUM_THREADS": "1"})         # ValueError naming the variable
"""

import re

from configs.common.files.reading import brief
from configs.common.secrets import holds_secret, is_secret_value

VARIABLE_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,200}$"
_NAME = re.compile(VARIABLE_NAME.strip("^$"))


def checked_variables(env: dict[str, str]) -> dict[str, str]:
    """Return them unchanged. Raises ValueError for a name that a process cannot have, and for a secret."""
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{brief(name)}: expected the name of a variable: letters, digits and _")
        if is_secret_value(name, value):
            raise ValueError(f"{name}: the name of a secret; values of env are kept in records, so remove it")
        if holds_secret(name, value):
            raise ValueError(f"{name}: contains a secret; values of env are kept in records, so remove it")
    return env
