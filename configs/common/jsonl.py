"""One line of a JSON Lines file, with errors that name the place."""

import json
from typing import Any


def parse_object(line: bytes, where: str, example: str) -> dict[str, Any]:
    """Return the object of a line. Raises ValueError, naming `where` and an example, for anything else."""
    try:
        data = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: got {type(data).__name__}, expected an object such as {example}")
    return data
