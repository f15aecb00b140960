"""Learn a byte-level BPE tokenizer from one text file: python -m engine.tools.train_tokenizer TEXT VOCABULARY OUT.json

Token 0 is `<|endoftext|>`; every byte has a token, so any text can be encoded. The same text and size give the same
tokenizer.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(text: Path, vocabulary: int) -> Tokenizer:
    """Train a tokenizer of `vocabulary` tokens, including the 256 bytes and `END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    return tokenizer


if __name__ == "__main__":
    source, size, destination = sys.argv[1:]
    train_tokenizer(Path(source), int(size)).save(destination)
