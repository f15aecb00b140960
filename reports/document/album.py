"""The figures of one report, by the name under which its text shows them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from configs.common.base import write_atomically
from configs.common.printable import file_slug
from configs.plans.paths import RunPaths
from reports.charts.chart import Chart
from reports.plots.style import drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Album:
    """The images drawn so far, by file name in `plots/`, and the charts by the figure's name.

    draws: whether images are wanted; charts alone cost next to nothing.
    """

    images: dict[str, bytes] = field(default_factory=dict)
    charts: dict[str, tuple[Chart, ...]] = field(default_factory=dict)
    draws: bool = True

    def add(self, title: str, draw: Callable[["Figure"], None], charts: tuple[Chart, ...], height: float = 3.1) -> str:
        """Draw and keep both formats; gives the name without suffix, which no other figure has."""
        slug = file_slug(title)
        name, count = slug, 1
        while name in self.charts:
            count += 1
            name = f"{slug}-{count}"
        self.charts[name] = charts
        for suffix, content in drawn(draw, height).items() if self.draws else ():
            self.images[f"{name}.{suffix}"] = content
        return name

    def write(self, run: RunPaths) -> None:
        """Write the images, and remove those of an earlier report that this one does not show.

        A link in the folder's place, as a foreign run folder may have one, is removed: not what it leads to.
        """
        if run.plots.is_symlink():
            run.plots.unlink(missing_ok=True)
        if self.images:
            run.plots.mkdir(exist_ok=True)
        for old in run.plots.glob("*") if run.plots.is_dir() else []:
            if old.suffix in (".png", ".svg") and old.name not in self.images:
                old.unlink(missing_ok=True)  # another report may be rendered at the same time
        for name, content in self.images.items():
            write_atomically(run.plots / name, content)
