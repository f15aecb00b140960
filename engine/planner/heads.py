"""The head that a cell computes, where it is not that of the class which the model's config.json names.

    as_computed(architecture, cell.workload)     # bert-base-uncased is published as BertForMaskedLM

`encode` runs the body alone, without pooler and head; a task of `train` makes the class of its own
(`engine.training.task_types`), whatever class was saved. A head to logits is a large part of a small model's products
and of its activations.
"""

from dataclasses import replace

from configs.workloads import AnyWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.families.parts import WeightTuple, classifier, head, linear, masked_head

_TOPS = ("head", "pooler", "classifier", "discriminator")
"""First parts of the names of the weights that are no part of the body."""
_LABELS = 2
"""Of a new classifier: how many classes the data have is not known, and they weigh nothing."""


def as_computed(architecture: Architecture, work: AnyWorkload) -> Architecture:
    """Return the architecture with the head that this workload computes; unchanged where that is its own."""
    to_logits = any(weight.role == "head" for weight in architecture.weights)
    task = work.task if isinstance(work, TrainWorkload) else None
    if work.kind == "encode":
        return _with_top(architecture, ())
    if task == "text_classification" and to_logits:
        return _with_top(architecture, _text_classifier(architecture))
    if task == "masked_lm" and not to_logits:
        width = _embedded_width(architecture)
        made = masked_head(architecture.vocabulary, architecture.hidden, width, tied=architecture.tied)
        return _with_top(architecture, made)
    if (work.kind in ("generate", "seq2seq") or task in ("causal_lm", "seq2seq")) and not to_logits:
        return _with_top(
            architecture, head(architecture.vocabulary, _embedded_width(architecture), tied=architecture.tied)
        )
    return architecture


def _with_top(architecture: Architecture, top: WeightTuple) -> Architecture:
    """Return the body with these weights on top."""
    body = tuple(weight for weight in architecture.weights if weight.name.partition(".")[0] not in _TOPS)
    return replace(architecture, weights=(*body, *top))


def _embedded_width(architecture: Architecture) -> int:
    """Return the width of the table of words, which logits are computed from: narrower in some families."""
    return next((weight.shape[1] for weight in architecture.weights if weight.name == "embedding"), architecture.hidden)


def _text_classifier(architecture: Architecture) -> WeightTuple:
    """Return the classifier of a text: of each token of a decoder, of one vector of another's sequence."""
    hidden = architecture.hidden
    if architecture.kind == "decoder":
        return linear("classifier", _LABELS, _embedded_width(architecture), 1, block=False)
    return (
        *linear("pooler", hidden, hidden, 1, bias=True, block=False, per_sequence=True),
        *classifier(_LABELS, hidden),
    )
