"""Layouts that the engine refuses on the ranks have no prediction."""

import pytest

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES, one_of_each_family
from configs.hardware.catalog import instance
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from engine.models.sharding import check_degrees
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture
from engine.planner.splits import why_not_split

NODE = instance("aws/p5.48xlarge")
WORK = {"kind": "generate", "prompt_tokens": 16, "batch_size": 2}
MODEL = read_architecture(ARCHITECTURES["llama-110m"])  # 12 heads, 4 of keys and values, 10 layers


@pytest.mark.parametrize("name", [*one_of_each_family(), "openllama-76m", "llama-110m"])
def test_a_layout_is_refused_where_the_engine_refuses_it(name: str) -> None:
    config, architecture = ModelConfig.parse(ARCHITECTURES[name]), read_architecture(ARCHITECTURES[name])
    for tp in range(1, 14):
        for pp in range(1, 6):
            try:
                check_degrees(config, tp, pp)
                refused = False
            except ValueError:
                refused = True
            assert (why_not_split(architecture, Layout(tp=tp, pp=pp)) is not None) == refused, (tp, pp)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(tp=8), "8 ranks cannot share 12 attention heads with 4 key and value heads evenly"),
        (Layout(tp=3), "3 ranks cannot share 12 attention heads with 4 key and value heads evenly"),
        (Layout(pp=11), "11 stages need a layer each, but the model has 10"),
    ],
)
def test_a_layout_that_cannot_be_split_is_not_predicted(layout: Layout, reason: str) -> None:
    said = predict_cell(
        Cell.model_validate({"model": "m", "workload": WORK, "layout": layout.model_dump()}), MODEL, NODE
    )
    assert said.tokens_per_second is None and said.fits is None and said.reason == reason


def test_training_splits_llamas_alone_and_their_heads_of_keys_and_values_too() -> None:
    work = TrainWorkload(global_batch_size=4, sequence_length=64)
    cells = [Cell(model="m", workload=work, layout=Layout(tp=tp)) for tp in (4, 6)]
    two = Cell(model="m", workload=work, layout=Layout(tp=2))
    for name in ("gpt2-1m", "qwen3-1m"):
        said = predict_cell(two, read_architecture(ARCHITECTURES[name]), NODE)
        assert said.tokens_per_second is None and "models are not split in training" in (said.reason or "")
    four, six = (predict_cell(cell, MODEL, NODE) for cell in cells)
    assert four.tokens_per_second and six.tokens_per_second is None
    assert six.reason == "4 key and value heads cannot be split by 6 in training"
