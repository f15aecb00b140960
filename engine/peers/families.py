"""What transformers knows of a text model whose family this engine lacks.

    model = text_model(context, "generate")       # ModelConfig, or what transformers' own configuration says

Peers run whatever transformers' automatic classes load; only our own engine needs to understand every option.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.families.config import ModelConfig
from configs.families.positions import are_distances, unused_positions
from configs.families.sizes import ModelForm, Positions
from engine.context import Context
from engine.models.text_model import TextModel
from engine.models.weights import check_kind, required_manifest
from engine.peers.folder_model import WorkKind

_KINDS: dict[WorkKind, ModelForm] = {"generate": "decoder", "seq2seq": "encoder_decoder", "encode": "encoder"}
_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_MAX_REASON = 200


@dataclass(frozen=True)
class PeerModel:
    """`engine.models.text_model.TextModel` by transformers' configuration; what it does not say is no limit."""

    family: str
    kind: ModelForm
    vocabulary: int
    positions: Positions
    max_positions: int
    windows: tuple[int | None, ...]
    start_token: int


def text_model(context: Context, work: WorkKind) -> TextModel:
    """Return the launch's model as its prompts need it.

    Raises ValueError for a model of another kind, and for one that transformers cannot load.
    """
    manifest = required_manifest(context)
    try:
        ModelConfig.parse(manifest.config)
    except (ValueError, KeyError, TypeError, AttributeError):  # not of this engine
        return _by_transformers(Path(manifest.folder), work, manifest.identity)
    return check_kind(context, work)


def _by_transformers(folder: Path, work: WorkKind, identity: str) -> PeerModel:
    import transformers
    from transformers import AutoConfig

    version = transformers.__version__
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a library that validates has errors of its own
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise ValueError(f"{identity}: transformers {version} cannot read config.json: {reason}") from error
    able = [kind for kind in _KINDS if type(config) in _mapping(kind)]
    if work == "generate" and config.is_encoder_decoder:
        able = [kind for kind in able if kind != "generate"]
    if work not in able:
        use = f"use {' or '.join(kind for kind in able)}" if able else "use another model"
        raise ValueError(
            f"workload.kind: {identity} ({config.model_type}) has no {work} model in transformers {version}; {use}"
        )
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ValueError(f"{identity}: config.json: vocab_size: got {vocabulary!r}, expected the number of tokens")
    limit = next((found for name in _LIMITS if isinstance(found := getattr(text, name, None), int) and found > 0), None)
    limit = None if are_distances(text.to_dict()) else limit
    start = getattr(config, "decoder_start_token_id", None)
    return PeerModel(
        family=str(config.model_type),
        kind=_KINDS[work],
        vocabulary=vocabulary,
        positions="relative" if limit is None else "learned",
        max_positions=limit - unused_positions(text.to_dict()) if limit else 0,
        windows=_windows(text),
        start_token=start if isinstance(start, int) else 0,
    )


def _mapping(work: WorkKind) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_MAPPING

    return {
        "generate": MODEL_FOR_CAUSAL_LM_MAPPING,
        "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "encode": MODEL_MAPPING,
    }[work]


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not isinstance(window, int) or (types is None and not getattr(config, "use_sliding_window", True)):
        return (None,)
    if types is None:
        return (window,)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
