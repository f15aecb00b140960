"""Sequence to sequence: a target text is predicted token by token from a source text (T5).

Data: rows with `source` and `target`. Both are truncated and padded to `sequence_length`, so that every step has equal
work; padding is masked and has no loss. The decoder's input is the target shifted by one, after the start token that
transformers' class has for the family, where config.json names none (BART: 2), or the target's own last token (mBART).
"""

import numpy as np
from torch import Tensor, nn

from configs.common.files.reading import brief
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import required_manifest
from engine.prompts.tokenizer import encoded, load_tokenizer
from engine.training.data.examples import (
    IGNORED,
    RANDOM_STEPS,
    ExampleParts,
    Examples,
    Inputs,
    Numbers,
    parted,
    read_rows,
    rows_fingerprint,
)
from engine.training.data.text import end_token, the_tokenizer
from engine.training.task_types.common import exported_config, filled_rows, seen, tensors, the_task
from engine.training.task_types.models import (
    check_length,
    fresh_model,
    padding_of,
    transformers_config,
    transformers_model,
    vocabulary_of,
)
from engine.training.trainer import Task

Pairs = list[tuple[list[int], list[int]]]
_LANGUAGE_LAST = ("mbart", "plbart")
"""Kinds whose decoder begins with what ends the target (`shift_tokens_right` of their modules in transformers)."""


def make_seq2seq(workload: TrainWorkload, context: Context) -> Task:
    """Return the task. Raises ValueError for an unsuitable model or length."""
    check_length(workload, context)
    model = fresh_model(context, lambda device: transformers_model("AutoModelForSeq2SeqLM", context, device))
    config = exported_config(required_manifest(context).config, model)
    return the_task(model, _logits, config, workload, context, classes=False)


def _logits(module: nn.Module, inputs: Inputs) -> Tensor:
    found = module(
        input_ids=inputs["tokens"],
        attention_mask=inputs["seen"],
        decoder_input_ids=inputs["decoded"],
        use_cache=False,
    )
    logits: Tensor = found.logits
    return logits


def seq2seq_parts(workload: TrainWorkload, context: Context) -> ExampleParts:
    """Return pairs of texts; validation rows are drawn, or from another file."""
    seed = context.job.measuring.seed
    if workload.data is None:
        return parted(_examples(_random(workload, context), workload, context), None, workload, seed)
    held = None
    if workload.validation_data is not None:
        held = _examples(_pairs(workload.validation_data, "validation_data", workload, context), workload, context)
    everything = _examples(_pairs(workload.data, "data", workload, context), workload, context)
    return parted(everything, held, workload, seed)


def _random(workload: TrainWorkload, context: Context) -> Pairs:
    count, length = RANDOM_STEPS * workload.global_batch_size, workload.sequence_length
    draw = np.random.default_rng(context.job.measuring.seed)
    ids = draw.integers(0, vocabulary_of(context), (count, 2, length)).tolist()
    return [(source, target) for source, target in ids]


def _pairs(data: str, field: str, workload: TrainWorkload, context: Context) -> Pairs:
    rows = read_rows(data, ["source", "target"], field, context)
    tokenizer, end = load_tokenizer(the_tokenizer(workload, context)), end_token(context)
    length, vocabulary, pairs = workload.sequence_length, vocabulary_of(context), []
    tokenizer.enable_truncation(length)  # which keeps the special tokens at the end, as transformers' does
    for number, row in enumerate(rows, start=1):
        where = f"workload.{field}: row {number}"
        source, target = (encoded(tokenizer, str(row[name]), where).ids for name in ("source", "target"))
        if end is not None and end not in target[-2:]:  # mBART's language follows it
            target = [*target[: length - 1], end]
        if not source or not target:
            raise ValueError(f"workload.{field}: row {number} becomes no token at all; leave it out")
        if max(*source, *target) >= vocabulary:
            raise ValueError(
                f"workload.tokenizer: row {number} of {field} becomes token {max(*source, *target)}, but the model has "
                f"{vocabulary}; use a tokenizer of the model's vocabulary"
            )
        pairs.append((source, target))
    return pairs


def _examples(pairs: Pairs, workload: TrainWorkload, context: Context) -> Examples:
    length, filling = workload.sequence_length, padding_of(context)
    start = _start_token(context, filling)
    lengths = np.array([len(target) for _, target in pairs], dtype=np.int64)

    def collate(numbers: Numbers, places: Numbers) -> Inputs:
        sources = [pairs[number][0] for number in numbers]
        targets = [pairs[number][1] for number in numbers]
        return tensors(
            tokens=filled_rows(sources, length, filling),
            seen=seen(sources, length),
            decoded=filled_rows(
                [[target[-1] if start is None else start, *target] for target in targets], length, filling
            ),
            targets=filled_rows(targets, length, IGNORED),
        )

    return Examples(
        count=len(pairs),
        positions=2 * length,
        collate=collate,
        targets=lambda numbers: lengths[numbers],
        fingerprint=rows_fingerprint(workload, context),
    )


def _start_token(context: Context, filling: int) -> int | None:
    """Return the decoder's first token; None: the last one of each target, which is its language."""
    manifest = required_manifest(context)
    config = transformers_config(manifest)
    if config.model_type in _LANGUAGE_LAST:
        return None
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        return filling
    if type(start) is not int or not 0 <= start < vocabulary_of(context):
        raise ValueError(
            f"{manifest.identity}: config.json: decoder_start_token_id is {brief(start)}; a token of the vocabulary, 0 "
            f"to {vocabulary_of(context) - 1}, is needed"
        )
    return start
