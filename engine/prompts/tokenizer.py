"""A model's tokenizer, read from its file. No torch.

tokenizer = load_tokenizer(folder / "tokenizer.json")
ids = encoded(tokenizer, text, "workload.prompts: line 3").ids
"""

from pathlib import Path

from tokenizers import Encoding, Tokenizer

from configs.common.printable import printable


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer without truncation and padding. Raises ValueError for an invalid file."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer that can be read ({printable(str(error), 300)})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encoded(
    tokenizer: Tokenizer, text: str, where: str, special: bool = True, lets_others_run: bool = False
) -> Encoding:
    """Tokenise a text, with special tokens or without.

    lets_others_run: other threads go on meanwhile, which `Tokenizer.encode` stops: it keeps Python's lock.
    Raises ValueError, naming `where`, for one that the tokenizer cannot take.
    """
    try:
        if lets_others_run:
            return tokenizer.encode_batch([text], add_special_tokens=special)[0]
        return tokenizer.encode(text, add_special_tokens=special)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{where}: the tokenizer fails ({printable(str(error), 300)})") from error


def highest_token(tokenizer: Tokenizer) -> int:
    """Return the largest id that a tokenizer produces; its ids may have gaps, so the size does not tell. -1: none."""
    return max(tokenizer.get_vocab().values(), default=-1)
