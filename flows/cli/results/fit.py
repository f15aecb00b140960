"""`rankwise fit`: fit scaling laws to a CSV file; print them as text or JSON and plot them.

Exit codes: 0 fitted (refused laws have a reason), 2 the file is wrong, 1 any other error.
"""

import json
import sys
from pathlib import Path

from flows.cli.options import write_output
from reports.laws.file import laws_json, laws_text, read_points
from reports.laws.fit import ResidualKind
from reports.laws.laws import fit_laws

FITTED, OTHER_ERROR, WRONG_FILE = 0, 1, 2


def fit_file(path: Path, as_json: bool, plot: Path | None, residuals: ResidualKind = "relative") -> int:
    """Fit every law that the file supports, print and plot them, and return the exit code.

    The default of `plot` is <name>-laws.png in the working directory; with JSON the default is no plot.
    """
    if plot is not None and plot.suffix not in (".png", ".svg"):
        return _refused(f"--plot: got {plot}, expected a name that ends in .png or .svg", WRONG_FILE)
    try:
        data = read_points(path)
    except ValueError as error:
        return _refused(str(error), WRONG_FILE)
    except OSError as error:
        return _refused(f"{path}: {error.strerror}", WRONG_FILE)
    laws = fit_laws(data.points, data.kind, data.paired, residuals=residuals)
    print(json.dumps(laws_json(laws), indent=1) if as_json else laws_text(laws, data).rstrip())
    drawing = plot or (None if as_json else Path(f"{path.stem}-laws.png"))
    if drawing is not None:
        from reports.plots.experiments.laws import draw_laws, laws_height
        from reports.plots.style import drawn

        images = drawn(lambda figure: draw_laws(figure, laws), laws_height(laws))
        try:
            write_output(drawing, images[drawing.suffix[1:]])
        except OSError as error:
            return _refused(f"{'--plot' if plot else 'plot'} {drawing}: {error.strerror}", OTHER_ERROR)
        print(f"plot: {drawing}", file=sys.stderr if as_json else sys.stdout)
    return FITTED


def _refused(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
