"""Export transformers' models as ONNX graphs for ONNX Runtime or TensorRT.

A graph supports decoding: the cache is input and output, batch and lengths are dynamic. Files by kind of model:

  decoder           decoder.onnx: input_ids, attention_mask, position_ids [batch, new] (the mask [batch, past + new]),
                    columns [k] (of which logits are wanted), past.<layer>.key and .value -> logits [batch, k, words],
                    present.<layer>.key and .value [batch, heads, past + new, width]
  encoder           encoder.onnx: input_ids, attention_mask, position_ids [batch, length] -> states
  encoder_decoder   encoder.onnx: input_ids, attention_mask -> cross.<layer>.key and .value, which the decoder's layers
                    make of the source once a request; decoder.onnx: as a decoder's without position_ids, and with
                    source_mask and the cross tensors

    names = write_graphs(model, "decoder", Path("folder"))

They are exported by torch.onnx.export with `dynamo=True`, which traces the model's code with torch.export.
"""

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

GraphKind = Literal["decoder", "encoder", "encoder_decoder"]
GraphOptimization = Literal["basic", "extended", "all"]
"""Level of ONNX Runtime's graph optimisation at load time."""

OPSET = 23
"""Version of ONNX's operators. In 23 attention is one of them, and 1 to 8 % faster than its parts in ONNX Runtime."""

_ROWS, _PAST, _NEW, _SOURCE = 2, 5, 3, 4  # sizes of the example; not 0 or 1, which export treats as constants


def write_graphs(model: Any, kind: GraphKind, folder: Path) -> list[Path]:
    """Write a model of transformers, on the CPU and in evaluation mode, as graphs; weights are stored beside them.

    Returns the .onnx files. Raises NotImplementedError if the exporter cannot trace the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), _quiet():
        if kind == "encoder":
            return [_write(_Encoder(model), _encoder_example(model), ["states"], folder / "encoder.onnx")]
        if kind == "decoder":
            cache = _cache_shapes(model)
            return [_write(_Decoder(model), _decoder_example(model, cache), _decoder_outputs(cache), _decoder(folder))]
        cache = _cross_shapes(model)
        cross = [f"cross.{layer}.{part}" for layer in range(len(cache)) for part in ("key", "value")]
        source = {"input_ids": _ids(_ROWS, _SOURCE), "attention_mask": _ones(_ROWS, _SOURCE)}
        return [
            _write(_Source(model), (source, []), cross, folder / "encoder.onnx"),
            _write(_CrossDecoder(model), _cross_example(model, cache), _decoder_outputs(cache), _decoder(folder)),
        ]


def takes_positions(model: Any) -> bool:
    """Return whether the model has position inputs; not with relative positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


class _Decoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._positions = takes_positions(model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, columns: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=_cache_of(past),
            use_cache=True,
            logits_to_keep=columns,
            **({"position_ids": position_ids} if self._positions else {}),
        )
        return (found.logits, *_tensors_of(found.past_key_values))


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        states: Tensor = found.last_hidden_state
        return states


class _Source(nn.Module):
    """An encoder, and the keys and values of the source for each decoder layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()
        self.layers = nn.ModuleList(block.layer[1].EncDecAttention for block in model.get_decoder().block)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        made = []
        for layer in self.layers:
            attention: Any = layer
            for product in (attention.k, attention.v):
                made.append(product(states).unflatten(-1, (-1, attention.key_value_proj_dim)).transpose(1, 2))
        return tuple(made)


class _CrossDecoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head = model.get_decoder(), model.lm_head
        self.width = model.config.d_model
        self.scale = self.width**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, source_mask: Tensor, columns: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        from transformers import EncoderDecoderCache

        past, cross = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        cache = EncoderDecoderCache(_cache_of(past), _cache_of(cross))
        cache.is_updated = dict.fromkeys(range(len(cross) // 2), True)
        # Only its shape is used: keys and values of the source exist already.
        source = cross[0].new_zeros(source_mask.shape[0], source_mask.shape[1], self.width)
        found = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=source,
            encoder_attention_mask=source_mask,
            past_key_values=cache,
            use_cache=True,
        )
        states = found.last_hidden_state[:, columns]
        return (self.head(states * self.scale), *_tensors_of(found.past_key_values.self_attention_cache))


def _cache_of(tensors: tuple[Tensor, ...]) -> Any:
    from transformers import DynamicCache

    return DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))


def _tensors_of(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _ids(rows: int, length: int) -> Tensor:
    return torch.ones(rows, length, dtype=torch.int64)


_ones = _ids

_Example = tuple[dict[str, Tensor], list[tuple[str, Tensor]]]
"""Named inputs, followed by those that are one list of equal tensors."""


def _cache_shapes(model: Any) -> list[tuple[int, int]]:
    """Return (heads, width) of each layer's cache, as created by the model."""
    cache = model(input_ids=_ids(1, 1), use_cache=True).past_key_values
    return [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers]


def _cross_shapes(model: Any) -> list[tuple[int, int]]:
    cache = model(input_ids=_ids(1, 1), decoder_input_ids=_ids(1, 1), use_cache=True).past_key_values
    return [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.self_attention_cache.layers]


def _layers(model: Any, name: str, cache: list[tuple[int, int]], length: int) -> list[tuple[str, Tensor]]:
    return [
        (f"{name}.{layer}.{part}", torch.zeros(_ROWS, heads, length, width, dtype=model.dtype))
        for layer, (heads, width) in enumerate(cache)
        for part in ("key", "value")
    ]


def _decoder_example(model: Any, cache: list[tuple[int, int]]) -> _Example:
    named = {
        "input_ids": _ids(_ROWS, _NEW),
        "attention_mask": _ones(_ROWS, _PAST + _NEW),
        "position_ids": torch.arange(_PAST, _PAST + _NEW).expand(_ROWS, _NEW).contiguous(),
        "columns": torch.arange(_NEW - 2, _NEW),
    }
    return named, _layers(model, "past", cache, _PAST)


def _cross_example(model: Any, cache: list[tuple[int, int]]) -> _Example:
    named = {
        "input_ids": _ids(_ROWS, _NEW),
        "attention_mask": _ones(_ROWS, _PAST + _NEW),
        "source_mask": _ones(_ROWS, _SOURCE),
        "columns": torch.arange(_NEW - 2, _NEW),
    }
    return named, [*_layers(model, "past", cache, _PAST), *_layers(model, "cross", cache, _SOURCE)]


def _encoder_example(model: Any) -> _Example:
    positions = torch.arange(_SOURCE).expand(_ROWS, _SOURCE).contiguous()
    named = {"input_ids": _ids(_ROWS, _SOURCE), "attention_mask": _ones(_ROWS, _SOURCE), "position_ids": positions}
    return named, []


def _decoder_outputs(cache: list[tuple[int, int]]) -> list[str]:
    return ["logits", *(f"present.{layer}.{part}" for layer in range(len(cache)) for part in ("key", "value"))]


def _decoder(folder: Path) -> Path:
    return folder / "decoder.onnx"


def _write(module: nn.Module, example: _Example, outputs: list[str], path: Path) -> Path:
    named, row = example
    free = torch.export.Dim.DYNAMIC
    shapes: list[Any] = [dict.fromkeys(range(tensor.dim()), free) for tensor in named.values()]
    if row:
        shapes.append(tuple({0: free, 2: free} for _ in row))
    try:
        torch.onnx.export(
            module.eval(),
            (*named.values(), *(tensor for _, tensor in row)),
            path,
            input_names=[*named, *(name for name, _ in row)],
            output_names=outputs,
            dynamic_shapes=tuple(shapes),
            dynamo=True,
            opset_version=OPSET,
            external_data=True,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise NotImplementedError(
            f"torch.onnx cannot export this model: {' '.join(str(error).split())[:300]}"
        ) from error
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's notes on operators of libraries that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
