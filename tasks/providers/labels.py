"""Names that all three clouds accept in tags and resource names."""

import getpass
import os
import re
import socket

_LENGTH = 50


def label(text: str, where: str = "name") -> str:
    """Return the text in lower-case letters, digits and dashes. Raises ValueError, naming where, if none is left."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LENGTH].rstrip("-")
    if not found:
        raise ValueError(f"{where}: got {text!r}, expected ASCII letters and digits")
    return found


def owner() -> str:
    """Return who rents: user and machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user no file names
        user = f"uid-{os.getuid()}"
    return label(f"{user}-{socket.gethostname()}")
