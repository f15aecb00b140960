"""One line of a JSON Lines file, with errors that name the place."""

from typing import Any

from configs.common.files.reading import parse_json


def parse_object(line: bytes, where: str, example: str) -> dict[str, Any]:
    """Return the object of a line. Raises ValueError, naming `where` and an example, for anything else."""
    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as programs of Windows write before the first line
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from error
    data = parse_json(line, where)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: got {type(data).__name__}, expected an object such as {example}")
    return data
