"""What a loaded engine does with batches, whichever engine it is.

transformers' models, shared out or not, are one `Work`, ONNX Runtime's graphs another (`engine.peers.onnx.peer`).

    loaded = model_work(load_peer(context, start), "generate", context.device)
    decode = loaded.work.decoder(new_tokens, capacity)

`engine.workloads.other_engines` measures it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.records.record import Figure
from engine.correctness.scoring import ModelEncodeScorer, ModelScorer, Seq2SeqScorer
from engine.models.text_model import TextModel
from engine.peers.decoding import generate_decoder
from engine.peers.loading import Peer
from engine.prompts.decoded import Decode
from engine.prompts.tokens import PromptBatch


class Work(Protocol):
    """What an engine does with batches: decode them, or give their last hidden states; and the scores of both."""

    def decoder(self, new_tokens: int, capacity: int) -> Decode:
        """Greedy decoding; capacity: positions of the longest sequence, or source."""

    def states(self, batch: PromptBatch) -> Tensor:
        """Last hidden states [rows, length, hidden]; at filling anything."""

    def scorer(self) -> Any:
        """`engine.correctness.answers.Scorer`, or `engine.correctness.embeddings.EncodeScorer` of an encoder."""


@dataclass(frozen=True)
class LoadedWork:
    """An engine that is ready. figures: of loading it, and sizes; inference_mode: else without gradients only.

    untimed: layers are read from disk, so few passes over large batches are made, and times mean nothing.
    """

    work: Work
    config: TextModel
    figures: dict[str, Figure]
    inference_mode: bool = True
    untimed: bool = False


def model_work(peer: Peer, kind: str, device: torch.device) -> LoadedWork:
    """Return the work of a loaded model of transformers, shared out or not; its load figures are taken."""
    return LoadedWork(ModelWork(peer, kind, device), peer.config, peer.load_figures(), peer.start.inference_mode)


class ModelWork:
    """`Work` by a model of transformers."""

    def __init__(self, peer: Peer, kind: str, device: torch.device) -> None:
        self._peer, self._device = peer, device
        scorers: dict[str, Any] = {"generate": ModelScorer, "seq2seq": Seq2SeqScorer, "encode": ModelEncodeScorer}
        self._scorer = scorers[kind](peer.model)

    def decoder(self, new_tokens: int, capacity: int) -> Decode:
        """Its own `generate`."""
        return generate_decoder(self._peer.model, new_tokens, capacity, self._device, self._peer.start.settings)

    def states(self, batch: PromptBatch) -> Tensor:
        """Its own forward pass."""
        states: Tensor = self._scorer.states(batch)
        return states

    def scorer(self) -> Any:
        """By its own forward pass too."""
        return self._scorer
