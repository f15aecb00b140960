"""A figure as a report draws it, kept to look at its parts."""

from collections.abc import Callable

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from reports.plots.style import STYLE


def drawn_figure(draw: Callable[[Figure], None], height: float) -> Figure:
    """Return the figure after its layout, in a report's style and width; height in inches."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(7.2, height), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05))
        FigureCanvasAgg(figure)
        draw(figure)
        figure.canvas.draw()
    return figure
