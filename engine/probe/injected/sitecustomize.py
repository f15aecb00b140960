"""Started by Python itself in the ranks of a measured script, because Rankwise puts this folder on their PYTHONPATH.

Registers a dump of all stacks for the agent's question after a hang and a mark that the interpreter came to its end,
and adds the probe to HF Trainer or Lightning when the script imports them (RANKWISE_INSTRUMENT). Then runs the
sitecustomize that would have been found without this one.
Nothing here may ever break a script: each part fails alone, and quietly but for one line.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _say(what, error):
    os.write(2, ("rankwise: %s: %s\n" % (what, error)).encode("utf-8", "replace"))


def _stacks():
    """All stacks into a file of this process, when the agent sends the signal named by the environment."""
    number = os.environ.get("RANKWISE_STACKS_SIGNAL")
    folder = os.environ.get("RANKWISE_STACKS")
    if number and folder and "RANK" in os.environ:
        import faulthandler

        path = os.path.join(folder, "stacks_%s.%d.txt" % (os.environ["RANK"], os.getpid()))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        faulthandler.register(int(number), file=descriptor, all_threads=True)


def _end():
    """A file of this process once its interpreter ends in order: what a library aborts later is no failure."""
    folder = os.environ.get("RANKWISE_STACKS")
    if folder and "RANK" in os.environ:
        import atexit

        own = os.getpid()
        path = os.path.join(folder, "end_%s.%d" % (os.environ["RANK"], own))
        atexit.register(lambda: os.getpid() == own and os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)))


def _instrument():
    """Watch for the import of the library that is to be measured."""
    wanted = os.environ.get("RANKWISE_INSTRUMENT")
    if wanted and "RANKWISE_PROBE" in os.environ:
        from rankwise_probe.callbacks import watch

        watch(wanted)


def _next_one():
    """Run the sitecustomize that this one hides, of a distribution or an environment."""
    import importlib.machinery

    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if found is not None and found.loader is not None and found.origin != __file__:
        import importlib.util

        found.loader.exec_module(importlib.util.module_from_spec(found))


for _part in (_stacks, _end, _instrument, _next_one):
    try:
        _part()
    except Exception as _error:
        _say(_part.__name__, _error)
