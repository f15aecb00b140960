"""Classification of texts and of images: one class for each row.

Texts: rows with `text` and `label` (a word or a number), truncated and padded to `sequence_length`, so that every step
has equal work. Images: an .npz of `images` (uint8, [rows, height, width] or [rows, height, width, channels]) and
`labels` (whole numbers), optionally `label_names`. The training data determines the classes, and the exported model has
their names.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor, nn

from configs.common.printable import some_of
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import required_manifest
from engine.prompts.tokenizer import encoded, load_tokenizer
from engine.training.data.examples import (
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
from engine.training.task_types.common import (
    SHOWN_CLASSES,
    exported_config,
    filled_rows,
    numbered_names,
    seen,
    tensors,
    the_task,
)
from engine.training.task_types.images import RANDOM_CLASSES, image_examples
from engine.training.task_types.models import (
    check_length,
    fresh_model,
    named_padding,
    transformers_model,
    vocabulary_of,
)
from engine.training.trainer import Task


def make_text(workload: TrainWorkload, context: Context, train: Examples) -> Task:
    """Return the task for texts. Raises ValueError for an unsuitable model or length."""
    check_length(workload, context)
    changes = _classes(train) | {"pad_token_id": train.filling}
    return _make("AutoModelForSequenceClassification", _text_logits, changes, workload, context)


def make_image(workload: TrainWorkload, context: Context, train: Examples) -> Task:
    """Return the task for images. Raises ValueError for a model without image input."""
    return _make("AutoModelForImageClassification", _image_logits, _classes(train), workload, context)


def _make(kind: str, call: Any, changes: dict[str, Any], workload: TrainWorkload, context: Context) -> Task:
    model = fresh_model(context, lambda device: transformers_model(kind, context, device, changes), changes)
    config = exported_config(required_manifest(context).config, model, **changes)
    return the_task(model, call, config, workload, context, classes=True)


def _classes(train: Examples) -> dict[str, Any]:
    """Return the configuration keys of the classes; their number follows from the names. Raises ValueError for one."""
    if len(train.names) < 2:
        raise ValueError(
            f"workload.data: all rows have the one label {train.names[0]!r}; give rows of other classes too"
        )
    return {
        "id2label": {str(number): name for number, name in enumerate(train.names)},
        "label2id": {name: number for number, name in enumerate(train.names)},
        "problem_type": "single_label_classification",
    }


def _text_logits(module: nn.Module, inputs: Inputs) -> Tensor:
    logits: Tensor = module(input_ids=inputs["tokens"], attention_mask=inputs["seen"]).logits
    return logits


def _image_logits(module: nn.Module, inputs: Inputs) -> Tensor:
    logits: Tensor = module(pixel_values=inputs["pixels"]).logits
    return logits


def text_parts(workload: TrainWorkload, context: Context) -> ExampleParts:
    """Return texts and their classes; validation rows are drawn, or from another file."""
    seed = context.job.measuring.seed
    if workload.data is None:
        draw = np.random.default_rng(seed)
        count = RANDOM_STEPS * workload.global_batch_size
        ids = draw.integers(0, vocabulary_of(context), (count, workload.sequence_length))
        labels = draw.integers(0, RANDOM_CLASSES, count)
        names = tuple(str(number) for number in range(RANDOM_CLASSES))
        end = end_token(context)
        if end is not None and required_manifest(context).config.get("is_encoder_decoder"):
            # T5 and BART judge a row by its end token, of which all rows must have equally many.
            ids[ids == end] = 0 if end else 1
            ids[:, -1] = end
        texts = ids.tolist()
        everything = _texts(texts, labels, names, _filling(texts, context), workload, context)
        return parted(everything, None, workload, seed)
    texts, said = _read(workload.data, "data", workload, context)
    names = label_names(said)
    labels = numbered(said, names, "data")
    held_texts: list[list[int]] = []
    if workload.validation_data is not None:
        held_texts, said = _read(workload.validation_data, "validation_data", workload, context)
    filling = _filling([*texts, *held_texts], context)
    everything, held = _texts(texts, labels, names, filling, workload, context), None
    if workload.validation_data is not None:
        labels = numbered(said, names, "validation_data")
        held = _texts(held_texts, labels, names, filling, workload, context)
    return parted(everything, held, workload, seed)


def _filling(texts: Sequence[Sequence[int]], context: Context) -> int:
    """Return the model's padding token; where it names none, its end token or else the first word, that ends no row.

    Decoders take the last token that is no padding for a row's end.
    """
    named = named_padding(context)
    if named is not None:
        return named
    last, vocabulary, end = {row[-1] for row in texts}, vocabulary_of(context), end_token(context)
    words = chain([] if end is None or end >= vocabulary else [end], range(vocabulary))
    return next((word for word in words if word not in last), 0)


def image_parts(workload: TrainWorkload, context: Context) -> ExampleParts:
    """Return images and their classes; validation rows are drawn, or from another file."""
    everything = image_examples(workload.data, "data", workload, context, ())
    held = None
    if workload.data is not None and workload.validation_data is not None:
        held = image_examples(workload.validation_data, "validation_data", workload, context, everything.names)
    return parted(everything, held, workload, context.job.measuring.seed)


def label_names(said: list[Any]) -> tuple[str, ...]:
    """Return the names of the classes: sorted words, or the numbers from 0 to the largest. Raises ValueError."""
    if all(isinstance(label, int) and not isinstance(label, bool) for label in said):
        if min(said) < 0:
            raise ValueError(f"workload.data: label {min(said)} is below 0; number classes from 0")
        return numbered_names(max(said), "data")
    return tuple(sorted({str(label) for label in said}))


def numbered(said: list[Any], names: tuple[str, ...], field: str) -> Numbers:
    """Return the index of each label. Raises ValueError for a label absent from the training data."""
    places = {name: number for number, name in enumerate(names)}
    for row, label in enumerate(said, start=1):
        if str(label) not in places:
            told = some_of(names, SHOWN_CLASSES)
            raise ValueError(f"workload.{field}: row {row} has the label {label!r}, which is none of data's: {told}")
    return np.array([places[str(label)] for label in said], dtype=np.int64)


def _read(data: str, field: str, workload: TrainWorkload, context: Context) -> tuple[list[list[int]], list[Any]]:
    """Return token ids and labels of all rows, with the tokenizer's special tokens."""
    rows = read_rows(data, ["text", "label"], field, context)
    tokenizer, vocabulary = load_tokenizer(the_tokenizer(workload, context)), vocabulary_of(context)
    tokenizer.enable_truncation(workload.sequence_length)
    texts = _encoded_rows(tokenizer, [str(row["text"]) for row in rows], field)
    for number, ids in enumerate(texts, start=1):
        if not ids:
            raise ValueError(f"workload.{field}: row {number} becomes no token at all; leave it out")
        if max(ids) >= vocabulary:
            raise ValueError(
                f"workload.tokenizer: row {number} of {field} becomes token {max(ids)}, but the model has "
                f"{vocabulary}; use a tokenizer of the model's vocabulary"
            )
    return texts, [row["label"] for row in rows]


def _encoded_rows(tokenizer: Tokenizer, texts: list[str], field: str) -> list[list[int]]:
    try:
        return [found.ids for found in tokenizer.encode_batch(texts)]
    except Exception:  # the library raises plain Exception, and names no row
        return [encoded(tokenizer, text, f"workload.{field}: row {n}").ids for n, text in enumerate(texts, start=1)]


def _texts(
    texts: list[list[int]],
    labels: Numbers,
    names: tuple[str, ...],
    filling: int,
    workload: TrainWorkload,
    context: Context,
) -> Examples:
    length = workload.sequence_length

    def collate(numbers: Numbers, places: Numbers) -> Inputs:
        rows = [texts[number] for number in numbers]
        return tensors(tokens=filled_rows(rows, length, filling), seen=seen(rows, length), targets=labels[numbers])

    return Examples(
        count=len(texts),
        positions=length,
        collate=collate,
        targets=lambda numbers: np.ones(len(numbers), dtype=np.int64),
        fingerprint=rows_fingerprint(workload, context),
        names=names,
        filling=filling,
    )
