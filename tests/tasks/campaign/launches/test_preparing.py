"""The first launch is prepared while its run begins."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = """
import threading
from pathlib import Path
from types import SimpleNamespace
from tasks.campaign.launches import preparing
preparing.job_of = lambda *_: SimpleNamespace(model_dump_json=lambda: chr(0xe9))
preparing.start_parent = lambda job, job_json: print(job_json.read_bytes())
preparing.prepare_first([object()], SimpleNamespace(targets=()), SimpleNamespace(records=Path("/nowhere")), Path())
[thread.join() for thread in threading.enumerate() if thread.name == "prepare"]
"""


def test_a_job_with_other_letters_is_prepared_in_every_locale() -> None:
    """Where LANG is not of UTF-8 a thread ended in a traceback, or the parent could not read the job."""
    legacy = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | legacy, cwd=ROOT, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"b'\\xc3\\xa9'\n", b"")
