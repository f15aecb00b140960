"""The program `rankwise`: its command line, whose import takes half a second, in which Ctrl-C just ends it.

Before the commands there is nobody who would turn an interruption into a message: it was a traceback.
"""

import signal


def main() -> None:
    """Run the command line; ends by SystemExit."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from flows.cli.main import app

    signal.signal(signal.SIGINT, before)
    app()
