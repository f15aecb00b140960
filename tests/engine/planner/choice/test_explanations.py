"""Sentences on what the planner chose, and on what would make a setup fit."""

from configs.common.execution import Layout
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.catalog import find_model
from engine.planner.choice.explanations import mended
from engine.planner.setup import InferenceSetup


def test_where_nothing_makes_it_fit_the_sentence_reads_whole() -> None:
    device = Accelerator(
        name="x", kind="cuda", memory_bytes=10**8, bytes_per_second=1e12, peak_flops={"bfloat16": 1e14}, source="test"
    )
    setup = InferenceSetup(find_model("gpt2"), Machine(name="x", accelerator=device), Layout())
    nothing = "nothing that is known makes it fit"
    assert mended(setup, None) == f"{nothing}; take a device with more memory or a smaller model"
    four = setup.replace(machine=Machine(name="x", accelerator=device, accelerators=4))
    assert mended(four, None).startswith(f"{nothing} on up to 4 x; take")
