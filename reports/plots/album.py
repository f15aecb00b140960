"""The figures of one report, by the name under which its text shows them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from configs.common.base import write_atomically
from configs.common.printable import file_slug
from configs.plans.paths import RunPaths
from reports.plots.style import drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Album:
    """The images drawn so far, by file name in `plots/`."""

    images: dict[str, bytes] = field(default_factory=dict)

    def add(self, title: str, draw: Callable[["Figure"], None], height: float = 3.1) -> str:
        """Draw and keep both formats; gives the name without suffix, which no other figure has."""
        slug = file_slug(title)
        name, count = slug, 1
        while f"{name}.png" in self.images:
            count += 1
            name = f"{slug}-{count}"
        for suffix, content in drawn(draw, height).items():
            self.images[f"{name}.{suffix}"] = content
        return name

    def write(self, run: RunPaths) -> None:
        """Write the images, and remove those of an earlier report that this one does not show."""
        if self.images:
            run.plots.mkdir(exist_ok=True)
        for old in run.plots.glob("*") if run.plots.is_dir() else []:
            if old.suffix in (".png", ".svg") and old.name not in self.images:
                old.unlink(missing_ok=True)  # another report may be rendered at the same time
        for name, content in self.images.items():
            write_atomically(run.plots / name, content)
