"""What prompts and answers need to know of a text model, whoever implements it: plain data, no torch.

`configs.families.config.ModelConfig` has it for the families of this engine; `engine.peers.families` for the others,
which only transformers runs.
"""

from typing import Protocol

from configs.families.sizes import ModelForm, Positions
from configs.records.record import Figure


class TextModel(Protocol):
    """Sizes and limits of a text model.

    positions: "relative" means that sequences have no maximum length; else it is `max_positions`, of the source of an
    encoder-decoder `max_source_positions`. windows: tokens that each layer's attention looks back (None: all).
    start_token: the first token of an encoder-decoder's decoder.
    """

    @property
    def family(self) -> str:
        """The `model_type` of config.json."""

    @property
    def kind(self) -> ModelForm:
        """Decoder, encoder or encoder-decoder."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    def positions(self) -> Positions:
        """How positions are told apart."""

    @property
    def max_positions(self) -> int:
        """Maximum length of a sequence in tokens."""

    @property
    def max_source_positions(self) -> int:
        """Maximum length of an encoder-decoder's source in tokens."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in tokens."""

    @property
    def start_token(self) -> int:
        """First token of an encoder-decoder's decoder."""


def limit_figures(model: TextModel) -> dict[str, Figure]:
    """Return figures of what answers can reach: the maximum length and the largest window in tokens; None: no limit."""
    windows = [window for window in model.windows if window is not None]
    return {
        "model_max_positions": None if model.positions == "relative" else model.max_positions,
        "model_window": max(windows, default=None),
    }
