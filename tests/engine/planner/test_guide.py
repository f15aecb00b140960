"""The table of model sizes: computed figures beside the promised ones, and the sentences where they differ."""

import pytest

from configs.hardware.catalog import accelerator
from engine.planner.guide import GUIDE_ACCELERATORS, PROMISES, GuideRow, guide_rows, guide_table, machine_with
from engine.planner.memory.inference import inference_memory
from engine.planner.setup import InferenceSetup


@pytest.fixture(scope="module")
def rows() -> dict[str, GuideRow]:
    return {row.size: row for row in guide_rows(accelerator("a100-80gb"))}


def test_sizes_and_promises(rows: dict[str, GuideRow]) -> None:
    assert list(rows) == ["7B", "13B", "30B", "65B"]
    assert [(row.promise.gpus, row.promise.memory_gb) for row in rows.values()] == [
        (4, (8, 12)), (4, (16, 20)), (8, (20, 24)), (16, (24, 28)),
    ]  # fmt: skip


def test_an_a100_needs_fewer_gpus_than_promised(rows: dict[str, GuideRow]) -> None:
    assert [row.gpus for row in rows.values()] == [1, 1, 1, 2]
    assert "1 GPU holds it where 4 are promised." in rows["7B"].sentences
    seven = rows["7B"]
    # 13.5 GB of weights and 1 GiB of cache for 2,048 tokens.
    assert seven.memory_gb is not None and 14.5 < seven.memory_gb < 16
    assert 13.5 / 4 < seven.promised_gpus_memory_gb < 8
    assert any("12 GB hold a batch of" in sentence for sentence in seven.sentences)


def test_speedups_are_those_of_physics(rows: dict[str, GuideRow]) -> None:
    for row in rows.values():
        assert row.speedup is not None and 1 < row.speedup < row.promise.gpus
        assert row.batch_speedup is not None and 1 < row.batch_speedup < row.promise.gpus
    said = " ".join(rows["7B"].sentences)
    assert "Over 4 times on 4 GPUs is more than linear" in said and "less than promised" in said
    assert "20 to 24 % efficiency" in " ".join(rows["65B"].sentences)
    assert "tp=4 x pp=2 leaves 1 of 2 stages idle" in " ".join(rows["30B"].sentences), "52 heads on 8 GPUs"


def test_a_device_of_24_gigabytes_needs_more() -> None:
    large, small = (guide_rows(accelerator(name)) for name in GUIDE_ACCELERATORS)
    assert all((few.gpus or 0) <= (many.gpus or 99) for few, many in zip(large, small, strict=True))
    assert small[0].gpus == 1 and (small[3].gpus or 0) >= 8
    for row, promise in zip(small, PROMISES, strict=True):
        assert row.gpus is not None and row.memory_gb is not None and row.memory_gb < 24.5
        assert row.promise is promise


def test_without_a_link_there_is_no_speed_and_a_reason() -> None:
    lonely = machine_with(accelerator("a100-80gb")).model_copy(update={"between": None})
    row = guide_rows(accelerator("a100-80gb"), lonely)[3]
    assert row.speedup is None and row.batch_speedup is None
    assert any(sentence.startswith("No link between") for sentence in row.sentences)
    header, cells = guide_table([row])
    assert cells[0][-2:] == ["-", "-"] and len(header) == len(cells[0]) == 9


def test_a_device_that_holds_nothing_says_so() -> None:
    tiny = accelerator("a100-80gb").model_copy(update={"memory_bytes": 2_000_000_000, "name": "tiny"})
    row = guide_rows(tiny)[3]
    assert row.gpus is None and row.memory_gb is None
    assert "16 GPUs do not hold it: it takes more than 64." in row.sentences
    assert guide_table([row])[1][0][2] == "-"


def test_the_figures_are_the_planner_s(rows: dict[str, GuideRow]) -> None:
    from engine.planner.catalog import find_model

    machine = machine_with(accelerator("a100-80gb"))
    setup = InferenceSetup(find_model("llama-7b"), machine, prompt_tokens=1024, new_tokens=1024)
    assert rows["7B"].memory_gb == inference_memory(setup).total / 1e9
