"""The head of a cell is that of its work, whatever class the model was saved as."""

from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from configs.spec.cell import Cell
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture
from engine.planner.heads import as_computed

MACHINE = Machine(name="node", accelerator=accelerator("a100-80gb"), accelerators=8)


def of_class(model: str, name: str, **changes: Any) -> Architecture:
    return read_architecture({**ARCHITECTURES[model], "architectures": [name], **changes}, name)


@pytest.mark.parametrize(
    ("model", "saved", "work", "computed"),
    [
        ("bert-1m", "BertModel", TrainWorkload(task="masked_lm"), "BertForMaskedLM"),
        ("bert-1m", "BertForSequenceClassification", TrainWorkload(task="masked_lm"), "BertForMaskedLM"),
        ("bert-1m", "BertForMaskedLM", TrainWorkload(task="text_classification"), "BertForSequenceClassification"),
        ("llama-1m", "LlamaForCausalLM", TrainWorkload(task="text_classification"), "LlamaForSequenceClassification"),
        ("llama-40m", "LlamaModel", TrainWorkload(task="causal_lm"), "LlamaForCausalLM"),
        ("qwen2-1m", "Qwen2Model", GenerateWorkload(), "Qwen2ForCausalLM"),
        ("t5-1m", "T5Model", TrainWorkload(task="seq2seq"), "T5ForConditionalGeneration"),
        ("t5-1m", "T5Model", Seq2SeqWorkload(), "T5ForConditionalGeneration"),
    ],
)
def test_a_task_has_its_own_head(model: str, saved: str, work: Any, computed: str) -> None:
    found, wanted = as_computed(of_class(model, saved), work), of_class(model, computed)
    assert found.parameters == wanted.parameters
    assert [weight.role == "head" for weight in found.weights].count(True) == (
        [weight.role == "head" for weight in wanted.weights].count(True)
    )


@pytest.mark.parametrize(
    ("model", "name", "work"),
    [
        ("bert-1m", "BertForMaskedLM", TrainWorkload(task="masked_lm")),
        ("bert-1m", "BertModel", TrainWorkload(task="text_classification")),
        ("llama-1m", "LlamaForCausalLM", TrainWorkload()),
        ("llama-1m", "LlamaForCausalLM", GenerateWorkload()),
        ("vit-2m", "ViTForImageClassification", TrainWorkload(task="image_classification")),
    ],
)
def test_a_model_that_has_the_head_is_unchanged(model: str, name: str, work: Any) -> None:
    saved = of_class(model, name)
    assert as_computed(saved, work) is saved


def test_an_encoder_s_body_alone_is_predicted() -> None:
    """bert-base-uncased names BertForMaskedLM, whose logits of all tokens were 4 GB of the predicted memory."""
    work = EncodeWorkload(batch_size=64, prompt_tokens=512, num_prompts=64)
    cell = Cell(model="m", workload=work)
    said = [predict_cell(cell, of_class("bert-109m", name), MACHINE) for name in ("BertModel", "BertForMaskedLM")]
    assert said[0] == said[1]
    body = as_computed(of_class("bert-109m", "BertModel"), work)
    assert body.parameters == of_class("bert-109m", "BertModel").parameters - (768 * 768 + 768)  # without its pooler
    assert said[0].peak_memory_bytes and said[0].peak_memory_bytes < 4 * body.parameters + 2e9


@pytest.mark.parametrize("task", ["masked_lm", "text_classification"])
def test_a_trained_encoder_is_predicted_as_its_task_makes_it(task: Any) -> None:
    work = TrainWorkload(task=task, global_batch_size=32, sequence_length=512)
    cell = Cell(model="m", workload=work, dtype="bfloat16")
    saved = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
    said = [predict_cell(cell, of_class("bert-109m", name), MACHINE) for name in saved]
    rates, peaks = ([getattr(one, name) for one in said] for name in ("tokens_per_second", "peak_memory_bytes"))
    assert max(rates) < 1.001 * min(rates) and max(peaks) < 1.001 * min(peaks)
