"""Training loss by step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from configs.rates import Floats
from reports.plots.style import COLOURS, LINES, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_losses(figure: "Figure", curves: Mapping[str, Floats]) -> None:
    """Training loss by step; at most as many curves as there are colours."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for index, (name, losses) in enumerate(list(curves.items())[: len(COLOURS)]):
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=COLOURS[index], linestyle=LINES[index % len(LINES)], linewidth=1.2, label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, nats a token")
    legend(figure, axes, columns=1)
