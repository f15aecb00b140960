"""Errors of a run that a user or the environment made: told in a sentence, without a traceback.

except EXPECTED as error:
    print(sentence_of(error))
"""

from pydantic import ValidationError

from configs.common.files.reading import validation_text
from tasks.models.hub import TransientFetchError

EXPECTED = (ValueError, OSError, TransientFetchError)
"""What a user can correct, or what may pass by itself; everything else is a fault of this program."""


def sentence_of(error: Exception, begun: bool = True) -> str:
    """What an error says to people: of fields, each by its name; of the system's, which file; of a run, what is kept.

    begun: whether a run had begun.
    """
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        kept = ". Completed measurements are kept; correct this and run again to resume" if begun else ""
        return f"{where}{error.strerror}{kept}"
    return validation_text(error) if isinstance(error, ValidationError) else str(error)
