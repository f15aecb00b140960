"""Masked language modelling: masked tokens of a packed text are predicted from both sides (BERT).

Targets are 15 % of the positions of each window, always the same number, so that every step has equally many; 80 % of
them are masked, 10 % replaced by another word, 10 % unchanged (Devlin et al. 2018, section 3.1). The choice is drawn
from the seed and the window's position in the concatenated epochs: new in each epoch, and the same on any number of
ranks.
"""

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor, nn

from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import required_manifest
from engine.prompts.tokenizer import highest_token, load_tokenizer
from engine.training.data.examples import IGNORED, ExampleParts, Examples, Inputs, Numbers, rows_fingerprint
from engine.training.data.text import check_long_enough, split_text, text_tokens, the_tokenizer, windows
from engine.training.task_types.common import exported_config, tensors, the_task
from engine.training.task_types.models import (
    check_length,
    fresh_model,
    transformers_model,
    vocabulary_of,
    without_filling,
)
from engine.training.trainer import Task

ASKED_SHARE = 0.15
_MASKED, _OTHER = 0.8, 0.1
_MASKS = ("[MASK]", "<mask>")


def make_masked(workload: TrainWorkload, context: Context) -> Task:
    """Return the task. Raises ValueError for an unsuitable model or length."""
    check_length(workload, context)
    model = without_filling(
        fresh_model(context, lambda device: transformers_model("AutoModelForMaskedLM", context, device))
    )
    config = exported_config(required_manifest(context).config, model)
    return the_task(model, _logits, config, workload, context, classes=False)


def _logits(module: nn.Module, inputs: Inputs) -> Tensor:
    logits: Tensor = module(input_ids=inputs["tokens"]).logits
    return logits


def masked_parts(workload: TrainWorkload, context: Context) -> ExampleParts:
    """Return windows of the text; validation is its last share, or another file."""
    vocabulary, needed = vocabulary_of(context), workload.sequence_length
    mask = _mask_token(workload, context, vocabulary)
    ids = text_tokens(workload.data, "data", workload, context, vocabulary)
    training, rest = split_text(ids, workload, needed)
    if workload.validation_data is not None:
        rest = text_tokens(workload.validation_data, "validation_data", workload, context, vocabulary)
        check_long_enough(rest, needed, "validation_data")
    held = _windows(rest, workload, context, mask) if len(rest) else None
    return _windows(training, workload, context, mask), held


def _mask_token(workload: TrainWorkload, context: Context, vocabulary: int) -> int:
    """Return the tokenizer's mask token; without one, a word of the model that the tokenizer never produces."""
    if workload.data is None:
        return vocabulary - 1
    tokenizer = load_tokenizer(the_tokenizer(workload, context))
    known = (tokenizer.token_to_id(name) for name in (*_MASKS, *_named_masks(tokenizer)))
    found = next((token for token in known if token is not None), None)
    if found is not None and found >= vocabulary:
        raise ValueError(
            f"workload.tokenizer: its mask is token {found}, but the model has {vocabulary}; "
            "use a tokenizer of the model's vocabulary"
        )
    if found is not None:
        return int(found)
    if highest_token(tokenizer) < vocabulary - 1:
        return vocabulary - 1
    raise ValueError(
        f"workload.tokenizer: it has no {' or '.join(_MASKS)}, and makes all {vocabulary} words of the model; use one "
        "with a mask, or one of fewer words"
    )


def _named_masks(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens whose text says that they are masks, such as `<|mask|>`."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and "mask" in token.content.lower()]


def _windows(ids: np.ndarray, workload: TrainWorkload, context: Context, mask: int) -> Examples:
    length, seed, words = workload.sequence_length, context.job.measuring.seed, vocabulary_of(context)
    asked = max(1, round(ASKED_SHARE * length))

    def collate(numbers: Numbers, places: Numbers) -> Inputs:
        tokens = windows(ids, numbers, length, length)
        targets = np.full_like(tokens, IGNORED)
        for row, place in enumerate(places):
            draw = np.random.default_rng([seed, int(place)])
            chosen = draw.permutation(length)[:asked]
            targets[row, chosen] = tokens[row, chosen]
            share = draw.random(asked)
            tokens[row, chosen[share < _MASKED]] = mask
            others = chosen[(share >= _MASKED) & (share < _MASKED + _OTHER)]
            tokens[row, others] = draw.integers(0, words, len(others))
        return tensors(tokens=tokens, targets=targets)

    return Examples(
        count=len(ids) // length,
        positions=length,
        collate=collate,
        targets=lambda numbers: np.full(len(numbers), asked),
        fingerprint=rows_fingerprint(workload, context),
    )
