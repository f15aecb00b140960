"""The style that all figures share, and what it leaves of Matplotlib's settings."""

import threading

import matplotlib
from matplotlib.figure import Figure

from reports.plots.style import drawn


def test_figures_of_two_threads_leave_the_settings_of_the_script() -> None:
    """Two reports at once left the report's style behind, and one of them was drawn with the script's."""
    with matplotlib.rc_context({"font.size": 17.0}):
        second_began, sizes = threading.Event(), []

        def first(_: Figure) -> None:
            second_began.wait(0.5)
            sizes.append(matplotlib.rcParams["font.size"])

        def second(_: Figure) -> None:
            second_began.set()
            threads[0].join(2)
            sizes.append(matplotlib.rcParams["font.size"])

        threads = [threading.Thread(target=drawn, args=(draw,)) for draw in (first, second)]
        threads[0].start()
        threads[0].join(0.2)  # it draws, or imports: in either order both are drawn with the report's style
        threads[1].start()
        for thread in threads:
            thread.join()
        assert sizes == [9.0, 9.0] and matplotlib.rcParams["font.size"] == 17.0
