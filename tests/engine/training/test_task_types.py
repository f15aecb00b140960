"""Every task learns, the same on two ranks as on one, and leaves a model that transformers and our engine load."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.flop_counter import FlopCounterMode

from configs.common.execution import Strategy
from configs.plans.model_manifest import ModelManifest
from engine.models.weights import build_model, load_figures
from engine.planner.families import read_architecture
from engine.training.data.examples import IGNORED
from engine.training.data.validation import evaluate, means
from engine.training.shares import make_feed, make_validation
from engine.training.task_types import load_examples, make_task
from engine.training.trainer import Task, TrainerOptions, TrainingBatch
from engine.workloads import train as workload
from tests.support.answers.sharded_runs import manifest_of
from tests.support.rank_pool import RankPool
from tests.support.training.training_tasks import (
    CASES,
    CONFIGS,
    CPU,
    CPU_ATTENTION,
    LEFT_OUT,
    MARIAN,
    MOBILENET,
    SWIN,
    images_in_16_bits,
    left_out_on_rank,
    made_context,
    refused_in_16_bits,
    running_means,
    train,
    train_on_rank,
    weights_after_decay,
    workload_of,
    write_inputs,
)

STEPS = 12
AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "text_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    write_inputs(made / "inputs")
    return made


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_seconds=120) as ranks:
        yield ranks


def peer_logits(peer: Any, batch: TrainingBatch) -> torch.Tensor:
    """transformers' own answer to our inputs, by its own names."""
    names = {"tokens": "input_ids", "seen": "attention_mask", "decoded": "decoder_input_ids", "pixels": "pixel_values"}
    inputs = {names[name]: tensor for name, tensor in batch.inputs.items() if name in names}
    with torch.no_grad():
        logits: torch.Tensor = peer.eval().float()(**inputs).logits
    return logits


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_follow_one_and_the_loss_falls(case: str, folder: Path, pool: RankPool) -> None:
    # One rank computes its batch at once, two accumulate theirs in two pieces.
    _, _, alone = train(made_context(folder, case), STEPS)
    for strategy in ("ddp", "fsdp"):
        shares = np.stack(pool.run(train_on_rank, str(folder), case, strategy, STEPS, 2))
        losses, norms = shares[:, :, 0].sum(axis=0), shares[:, :, 1]
        assert np.array_equal(norms[0], norms[1])
        # float32 on both sides: only the order of sums differs, and twelve steps let it grow.
        assert np.allclose(losses, alone[:, 0], rtol=1e-4), strategy
        assert np.allclose(norms[0], alone[:, 1], rtol=1e-3), strategy
    # Whatever the task's first loss (that of the other classes, or words), a dozen steps learn much of these data.
    assert alone[-3:, 0].mean() < 0.85 * alone[0, 0]


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_ddp_trains_models_with_weights_that_the_task_leaves_out(kind: str, folder: Path, pool: RankPool) -> None:
    """torch refuses the second step, and exchanges not all gradients of the first, unless it looks for them."""
    case, config = LEFT_OUT[kind]
    _, task, alone = train(made_context(folder, case, config=config), 3)
    shares = np.stack(pool.run(left_out_on_rank, str(folder), kind, 3))
    assert np.allclose(shares[:, :, 0].sum(axis=0), alone[:, 0], rtol=1e-5)
    assert np.allclose(shares[:, :, 1], alone[:, 1], rtol=1e-4)
    assert not task.leaves_weights_out, "a single rank does not ask"


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_zero_trains_a_model_of_an_odd_number_of_elements(strategy: Strategy, folder: Path, pool: RankPool) -> None:
    """As classifiers of three classes have; `allgather_bucket_size must be a multiple of ...`, DeepSpeed said."""
    rows = [{"text": f"day {n}", "label": str(n % 3)} for n in range(12)]
    (folder / "inputs" / "thirds.ndjson").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _, task, alone = train(made_context(folder, "bert classes", data="thirds"), 2)
    assert sum(one.numel() for one in task.model.parameters()) % 2
    shares = np.stack(pool.run(train_on_rank, str(folder), "bert classes", strategy, 2, 4, "thirds"))
    assert np.allclose(shares[:, :, 0].sum(axis=0), alone[:, 0], rtol=1e-5)
    assert np.allclose(shares[:, :, 1], alone[:, 1], rtol=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_what_a_model_freezes_is_not_trained(strategy: str, folder: Path, pool: RankPool) -> None:
    """ZeRO lets weights decay that have no gradient: Marian's table of sines became smaller with each step."""
    frozen = "model.encoder.embed_positions.weight"
    context = made_context(folder, "t5", config=MARIAN, weight_decay=10.0)
    before = dict(make_task(workload_of(context), context).model.named_parameters())[frozen].detach().numpy().copy()
    _, task, _ = train(context, 3)
    [whole, _] = pool.run(weights_after_decay, str(folder), strategy)
    assert np.array_equal(whole[frozen], before)
    for name, tensor in task.model.state_dict().items():
        assert np.allclose(whole[name], tensor.numpy(), atol=1e-5), name


@pytest.mark.parametrize("kind", ["bart", "mbart", "plbart", "m2m_100", "led", "pegasus", "blenderbot"])
def test_a_decoder_begins_as_transformers_shifts_its_targets(kind: str, folder: Path) -> None:
    """A config.json without decoder_start_token_id began with the padding token, whatever the family's class has."""
    config = {name: value for name, value in MARIAN.items() if name != "decoder_start_token_id"} | {"model_type": kind}
    config |= {"pad_token_id": 1, "eos_token_id": 2, "max_encoder_position_embeddings": 64, "attention_window": 4}
    context = made_context(folder, "t5", config=config)
    rows, _ = load_examples(workload_of(context), context)
    batch = rows.collate(np.arange(8), np.arange(8))
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model(**config))
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        theirs = model.prepare_decoder_input_ids_from_labels(batch["targets"])
    else:
        module = importlib.import_module(type(model).__module__)
        theirs = module.shift_tokens_right(batch["targets"], 1, model.config.decoder_start_token_id)
    learned = batch["targets"] != IGNORED
    assert torch.equal(batch["decoded"][learned], theirs[learned]) and learned.sum() > 20
    if kind != "mbart":
        return
    language = Tokenizer.from_file(str(folder / "inputs" / "words.json"))  # which follows the end: "X </s> en_XX"
    language.post_processor = processors.TemplateProcessing("$A </s> [SEP]", special_tokens=[("</s>", 2), ("[SEP]", 3)])
    language.save(str(folder / "inputs" / "language.json"))
    context = made_context(folder, "t5", config=config, tokenizer="language")
    rows, _ = load_examples(workload_of(context), context)
    batch = rows.collate(np.arange(8), np.arange(8))
    assert set(batch["decoded"][:, 0].tolist()) == {3}
    assert all(row[row != IGNORED][-2:].tolist() == [2, 3] for row in batch["targets"])


def test_a_source_and_a_target_have_limits_of_their_own(folder: Path) -> None:
    config = MARIAN | {"model_type": "led", "pad_token_id": 1, "encoder_layers": 2, "attention_window": [8, 4]}
    config |= {"max_encoder_position_embeddings": 62, "max_decoder_position_embeddings": 60}
    context = made_context(folder, "t5", config=config, sequence_length=57)
    with pytest.raises(ValueError, match=r"workload.sequence_length: 57 is more than the model's 56"):
        make_task(workload_of(context), context)
    _, _, found = train(made_context(folder, "t5", config=config, sequence_length=56), 1)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(("config", "strategies"), [(SWIN, ["fsdp", "zero2", "zero3"]), (MOBILENET, ["fsdp"])])
def test_images_are_learnt_in_16_bits(
    config: dict[str, Any], strategies: list[Strategy], folder: Path, pool: RankPool
) -> None:
    """Pixels have the type of the working weights where the model does not see to it; batch norms stay in float32."""
    answers = pool.run(images_in_16_bits, str(folder), config, ["ddp", *strategies])
    losses = {name: sum(answer[name][0][0, 0] for answer in answers) for name in ["ddp", *strategies]}
    for name in strategies:
        assert losses[name] == pytest.approx(losses["ddp"], rel=1e-2)
        assert all(np.isfinite(answer[name][0]).all() and np.isfinite(answer[name][1]) for answer in answers)


def test_batch_norms_in_16_bits_are_refused_with_zero(folder: Path, pool: RankPool) -> None:
    for said in pool.run(refused_in_16_bits, str(folder), MOBILENET, "zero1"):
        assert said.startswith("dtype: bfloat16 with DeepSpeed gives batch norms 16-bit weights")


@pytest.mark.parametrize("case", CASES)
def test_what_is_exported_says_the_same_in_transformers(case: str, folder: Path, tmp_path: Path) -> None:
    context = made_context(folder, case)
    trainer, task, _ = train(context, 2)
    task.export(trainer.whole_model(), tmp_path)
    peer = getattr(transformers, AUTO[workload_of(context).task]).from_pretrained(tmp_path, local_files_only=True)
    assert peer.dtype == torch.bfloat16
    if case in ("bert", "t5"):  # off in training, but not for whoever trains it on
        assert 0.1 in (getattr(peer.config, "hidden_dropout_prob", 0), getattr(peer.config, "dropout_rate", 0))
    feed = make_feed(workload_of(context), TrainerOptions.of(context.job.cell), context, task)
    [batch] = feed.step(7)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.copy_(parameter.bfloat16())  # what the export has rounded
        loss = task.loss(task.model.eval(), batch)
        ours = task.model(batch.inputs["tokens"]) if case == "llama" else peer_logits(task.model, batch)
    logits, targets = peer_logits(peer, batch), batch.inputs["targets"]
    assert torch.allclose(ours, logits, atol=1e-5)
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    assert torch.allclose(loss, theirs, rtol=1e-5)
    tokenizer = tmp_path / "tokenizer.json"
    assert tokenizer.is_file() and transformers.AutoTokenizer.from_pretrained(tmp_path)("so dull").input_ids


@pytest.mark.parametrize(("case", "files"), [("bert", "BertModel"), ("bert classes", "BertForMaskedLM")])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_flops_count_the_head_that_is_trained(checkpointing: str, case: str, files: str, folder: Path) -> None:
    config = CONFIGS["bert"] | {"architectures": [files]}
    context = made_context(folder, case, config=config, steps=3, activation_checkpointing=checkpointing)
    running = workload.prepare(context.job.measurements[0], workload_of(context), context)
    (batch,) = running.feed.step(0)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        running.trainer.backward(running.trainer.forward(batch), batch, last=True)
    figures = workload.run(context.job.measurements[0], context).figures
    assert figures["hardware_flops_per_step"] == pytest.approx(counter.get_total_flops(), rel=1e-6)
    # 6 for each parameter and token, 12 x layers x hidden x length for attention.
    parameters = sum(parameter.numel() for parameter in running.task.model.parameters())
    assert figures["model_flops_per_step"] == 8 * 16 * (6 * parameters + 12 * 2 * 32 * 16)


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_an_image_has_as_many_tokens_as_its_model_computes(kind: str, folder: Path) -> None:
    config = CONFIGS["vit"] | {"model_type": kind, "patch_size": 4, "architectures": []}
    context = made_context(folder, "vit", config=config)
    train_rows, _ = load_examples(workload_of(context), context)
    model = make_task(workload_of(context), context).model
    [table] = [one for name, one in model.named_parameters() if name.endswith("position_embeddings")]
    assert train_rows.positions == table.shape[1] == read_architecture(config).positions


@pytest.mark.parametrize("config", [MOBILENET, SWIN], ids=["mobilenet", "swin"])
def test_records_say_how_many_batch_norms_a_model_has(config: dict[str, Any], folder: Path) -> None:
    context = made_context(folder, "vit", config=config, steps=3)
    norms = [one for one in make_task(workload_of(context), context).model.modules() if "BatchNorm" in str(type(one))]
    assert workload.run(context.job.measurements[0], context).figures.get("batch_norms") == (len(norms) or None)
    assert bool(norms) == (config is MOBILENET)


def test_running_means_are_exported_with_the_weights(folder: Path, tmp_path: Path) -> None:
    trainer, task, _ = train(made_context(folder, "vit", config=MOBILENET), 2)
    state = trainer.whole_model()
    task.export(state, tmp_path / "model")
    peer = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    written = {name: tensor for name, tensor in peer.named_buffers() if name in state}
    assert len(written) > 100 and any("running_var" in name for name in written)
    for name, tensor in written.items():
        assert torch.equal(tensor.to(state[name].dtype), state[name].to(tensor.dtype).to(state[name].dtype)), name
    assert {int(tensor) for name, tensor in written.items() if name.endswith("num_batches_tracked")} == {2}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_ranks_evaluate_and_export_with_the_running_means_of_all_rows(
    strategy: Strategy, folder: Path, pool: RankPool
) -> None:
    parts = pool.run(running_means, str(folder), strategy)
    owns = [own for own, _, _ in parts]
    assert not np.array_equal(*owns)
    for _, evaluated, exported in parts:
        np.testing.assert_allclose(evaluated, np.mean(owns, axis=0), rtol=1e-6)
        assert np.array_equal(exported, evaluated)


def test_decoders_are_loaded_by_the_inference_engine(folder: Path, tmp_path: Path, pool: RankPool) -> None:
    from tests.support.answers.sharded_runs import Run, forward  # imported by the ranks too

    for case in ("llama", "gpt2"):
        trainer, task, _ = train(made_context(folder, case), 1)
        task.export(trainer.whole_model(), tmp_path / case)
        tokens = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]
        [found, _] = pool.run(forward, Run(1, 2, 1, str(tmp_path / case), tokens))
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / case, local_files_only=True)
        with torch.no_grad():
            theirs = peer.float().eval()(input_ids=torch.tensor(tokens)).logits
        assert torch.allclose(torch.from_numpy(found["logits"]), theirs, atol=1e-4)
    build_model(manifest_of(str(tmp_path / "llama")), torch.float32, CPU)


def test_accumulation_over_uneven_filling_is_one_big_batch(folder: Path) -> None:
    """Targets are of 1 to 6 tokens: a mean of the micro-batches' means would be another loss."""
    gradients, losses, means_of_means = [], [], []
    for micro in (8, 2):
        context = made_context(folder, "t5", micro_batch_size=micro)
        task = make_task(workload_of(context), context)
        batches = make_feed(workload_of(context), TrainerOptions.of(context.job.cell), context, task).step(3)
        assert len(batches) == 8 // micro and sum(batch.share for batch in batches) == pytest.approx(1)
        parts = [task.loss(task.model, batch) for batch in batches]
        whole = sum((part * batch.share for part, batch in zip(parts, batches, strict=True)), torch.zeros(()))
        whole.backward()  # type: ignore[no-untyped-call]
        losses.append(whole.item())
        means_of_means.append(np.mean([part.item() for part in parts]))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in task.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert abs(means_of_means[1] - losses[0]) > 1e-4 * losses[0]
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_every_measurement_starts_from_the_same_weights_in_a_model_of_its_own(folder: Path) -> None:
    context = made_context(folder, "bert classes", measurements=2)
    first = make_task(workload_of(context), context).model
    before = {name: parameter.detach().clone() for name, parameter in first.named_parameters()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    second = make_task(workload_of(context), context).model
    assert all(torch.equal(parameter, before[name]) for name, parameter in second.named_parameters())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in second.parameters())
    figures = load_figures(context)
    assert figures["model_parameters"] == sum(parameter.numel() for parameter in second.parameters())
    # Another launch makes the same weights, and no other random number of the process is touched.
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    again = make_task(workload_of(context), made_context(folder, "bert classes")).model
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in again.named_parameters())


@pytest.mark.parametrize("case", ["gpt2", "bert", "t5", "bert classes", "vit"])
def test_dropout_is_off_and_every_weight_learns(case: str, folder: Path) -> None:
    context = made_context(folder, case)
    task = make_task(workload_of(context), context)
    batch = make_feed(workload_of(context), TrainerOptions.of(context.job.cell), context, task).step(0)[0]
    assert task.model.training
    losses = [task.loss(task.model, batch) for _ in range(2)]
    assert losses[0].item() == losses[1].item()
    losses[0].backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in task.model.named_parameters() if parameter.grad is None] == []
    assert len(task.blocks) == (4 if case == "t5" else 2)


_NOISY_BERT = CONFIGS["bert"] | {"hidden_dropout_prob": 0.5, "architectures": None}
_NOISY_DECODER = _NOISY_BERT | {"is_decoder": True, "add_cross_attention": True}
NOISY: dict[str, tuple[str, dict[str, Any]]] = {
    # Rates of each stage, in a list.
    "cvt": ("vit", {"embed_dim": [8, 8, 8], "num_heads": [1, 1, 1], "depth": [1, 2, 3], "drop_path_rate": [0.5] * 3}),
    # A whole number, which takes no 0.0.
    "levit": ("vit", {"image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 1, 1],
                      "depths": [1, 1, 1], "key_dim": [8, 8, 8]}),
    # Of parts.
    "encoder-decoder": ("t5", {"encoder": _NOISY_BERT, "decoder": _NOISY_DECODER, "pad_token_id": 0,
                               "decoder_start_token_id": 1}),
    # Noise of a router.
    "switch_transformers": ("t5", CONFIGS["t5"] | {"num_experts": 4, "router_jitter_noise": 0.9,
                                                   "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOISY)
def test_nothing_is_drawn_in_a_step(kind: str, folder: Path) -> None:
    case, config = NOISY[kind]
    told = {"image_size": 32, "vocab_size": 320} | config | {"model_type": kind}
    context = made_context(folder, case, config=told, **({"data": None} if case == "vit" else {}))
    task = make_task(workload_of(context), context)
    batch = make_feed(workload_of(context), TrainerOptions.of(context.job.cell), context, task).step(0)[0]
    assert task.model.training
    assert len({task.loss(task.model, batch).item() for _ in range(3)}) == 1
    # Whoever trains the exported model on has the noise again.
    assert task.config | told | {"architectures": None} == task.config | {"architectures": None}


def test_deit_needs_no_class_in_its_config(folder: Path) -> None:
    config = {name: value for name, value in CONFIGS["vit"].items() if name != "architectures"}
    context = made_context(folder, "vit", config=config | {"model_type": "deit", "patch_size": 4})
    assert type(make_task(workload_of(context), context).model).__name__ == "DeiTForImageClassification"


def test_an_encoder_decoder_classifies_random_rows(folder: Path) -> None:
    """It judges a row by its end token, of which random rows have none or several."""
    context = made_context(folder, "bert classes", config=CONFIGS["t5"], data=None)
    _, _, found = train(context, 2)
    assert np.isfinite(found).all()


def test_classes_of_the_data_become_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    """From a folder, as a model is fine-tuned: its weights stay, only the head is new."""
    context = made_context(folder, "bert")
    trainer, task, _ = train(context, 1)
    task.export(trainer.whole_model(), tmp_path / "pretrained")
    tuned = made_context(folder, "bert classes", manifest=manifest_of(str(tmp_path / "pretrained")))
    found = make_task(workload_of(tuned), tuned)
    taken = dict(found.model.named_parameters())
    for name, parameter in task.model.named_parameters():
        if name.startswith("bert."):
            assert torch.equal(taken[name], parameter.bfloat16().float()), name
    assert taken["classifier.weight"].shape[0] == 2
    found.export({name: parameter.detach() for name, parameter in taken.items()}, tmp_path / "tuned")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "tuned")
    assert read.id2label == {0: "bad", 1: "good"} and read.architectures == ["BertForSequenceClassification"]


def test_measurements_of_one_launch_may_have_other_classes(folder: Path) -> None:
    rows = [f'{{"text": "day {n}", "label": "{n % 3}"}}\n' for n in range(9)]
    (folder / "inputs" / "three.ndjson").write_text("".join(rows))
    context = made_context(folder, "bert classes", measurements=3)
    work = workload_of(context)
    widths = []
    for data in ("reviews", "three", "reviews"):
        task = make_task(work.model_copy(update={"data": data}), context)
        widths.append(dict(task.model.named_parameters())["classifier.bias"].shape[0])
    assert widths == [2, 3, 2]


def test_validation_counts_every_row_once(folder: Path) -> None:
    context = made_context(folder, "bert classes", heldout_share=0.3, micro_batch_size=4)
    work, options = workload_of(context), TrainerOptions.of(context.job.cell)
    task = make_task(work, context)
    held = make_validation(work, options, context, task)
    trainer = Held(task)
    sums = evaluate(trainer, task, held, context, options)  # type: ignore[arg-type]
    assert sums["targets"] == 12 and trainer.module.training
    rows = load_examples(work, context)[1]
    assert rows is not None and rows.count == 12
    numbers = np.arange(12)
    with torch.no_grad():
        whole = task.metrics(task.model, TrainingBatch(rows.collate(numbers, numbers), 1, 12, 12 * 16))
    assert sums["loss"] == pytest.approx(float(whole["loss"]), rel=1e-6)
    found = means(sums)
    assert found["accuracy"] == float(whole["correct"]) / 12 and "perplexity" not in found
    assert means({"loss": 10 * np.log(5), "targets": 10})["perplexity"] == pytest.approx(5)
    assert make_validation(work.model_copy(update={"heldout_share": 0}), options, context, task) == []


class Held:
    """As much of a trainer as evaluation asks for."""

    def __init__(self, task: Task) -> None:
        self.module = task.model

    def evaluating(self) -> Any:
        return torch.no_grad()


@pytest.mark.parametrize(
    ("case", "work", "message"),
    [
        ("llama", {"sequence_length": 65}, "workload.sequence_length: 65 is more than the model's 64"),
        ("bert", {"sequence_length": 65}, "workload.sequence_length: 65 is more than the model's 64"),
        ("t5", {"data": "text"}, "workload.data: task seq2seq learns from rows"),
        ("t5", {"data": "reviews"}, "workload.data: row 1 has no `source`; each needs source and target"),
        ("t5", {"data": "absent"}, r"workload.data: .*absent is missing, with any of .txt, .ndjson, .npz"),
        ("bert classes", {"data": "stories"}, "workload.data: row 1 has no `label`"),
        ("bert classes", {"heldout_share": 0.01}, "workload.heldout_share: 0.01 of 40 rows leaves a part without any"),
        ("bert classes", {"validation_data": "unknown"}, "workload.validation_data: row 1 has the label 'so so'"),
        ("bert classes", {"tokenizer": None}, "workload.tokenizer: synthetic:tiny@1 brings no tokenizer"),
        ("bert classes", {"data": "alike"}, "workload.data: all rows have the one label 'good'"),
        ("llama", {"tokenizer": "strict"}, "workload.data: the tokenizer fails .*UNK"),
        ("t5", {"tokenizer": "strict"}, "workload.data: row 1: the tokenizer fails .*UNK"),
        ("bert classes", {"tokenizer": "strict"}, "workload.data: row 1: the tokenizer fails .*UNK"),
        ("vit", {"data": "reviews"}, "workload.data: task image_classification learns from an .npz"),
        ("vit", {"data": "large"}, "workload.data: images of 9 x 9 x 3; the model takes 8 x 8 x 3"),
        ("vit", {"data": "wide"}, "workload.data: `images` is int64 of shape"),
        ("vit", {"data": "unlabelled"}, "workload.data: the .npz holds no `labels`"),
        ("vit", {"data": "identified"}, "workload.data: label 5000000 would be one of 5,000,001 classes"),
        ("vit", {"data": "damaged"}, "workload.data: not an .npz that can be read"),
        ("vit", {"data": "pickled"}, "workload.data: not an .npz that can be read without unpickling"),
    ],
)
def test_mistakes_are_named_by_field(case: str, work: dict[str, Any], message: str, folder: Path) -> None:
    inputs, labels = folder / "inputs", np.zeros(3, dtype=np.int64)
    (inputs / "unknown.ndjson").write_text('{"text": "fine", "label": "so so"}\n')
    np.savez(inputs / "large.npz", images=np.zeros((3, 9, 9), dtype=np.uint8), labels=labels)
    np.savez(inputs / "wide.npz", images=np.zeros((3, 8, 8), dtype=np.int64), labels=labels)
    np.savez(inputs / "unlabelled.npz", images=np.zeros((3, 8, 8), dtype=np.uint8))
    np.savez(inputs / "pickled.npz", images=np.array([{}, []], dtype=object), labels=labels)
    np.savez(inputs / "identified.npz", images=np.zeros((3, 8, 8), dtype=np.uint8), labels=labels + 5_000_000)
    (inputs / "alike.ndjson").write_text('{"text": "fine", "label": "good"}\n' * 3)
    strict = Tokenizer(models.WordLevel({"a": 0, "fine": 1, "day": 2}))  # and no token for what is unknown
    strict.pre_tokenizer = pre_tokenizers.Whitespace()
    strict.save(str(inputs / "strict.json"))
    write_damaged(inputs / "damaged.npz", labels)
    context = made_context(folder, case, **work)
    with pytest.raises(ValueError, match=message):
        make_task(workload_of(context), context)


@pytest.mark.parametrize(("case", "kind"), [("bert", "roberta"), ("bert", "esm"), ("bert classes", "markuplm")])
def test_a_roberta_takes_fewer_tokens_than_its_table_of_positions_has_rows(case: str, kind: str, folder: Path) -> None:
    config = CONFIGS["bert"] | {"model_type": kind, "pad_token_id": 1, "mask_token_id": 4}
    context = made_context(folder, case, config=config, sequence_length=63)
    with pytest.raises(ValueError, match=r"workload.sequence_length: 63 is more than the model's 62"):
        make_task(workload_of(context), context)
    _, _, found = train(made_context(folder, case, config=config, sequence_length=62), 1)
    assert np.isfinite(found).all()


def test_rotated_positions_have_no_table_that_begins_after_the_padding(folder: Path) -> None:
    config = CONFIGS["bert"] | {"model_type": "esm", "pad_token_id": 1, "mask_token_id": 4}
    context = made_context(folder, "bert", config=config | {"position_embedding_type": "rotary"}, sequence_length=64)
    _, _, found = train(context, 1)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("bert", {"vocab_size": [320]}, r"config\.json: vocab_size \[320\], expected a whole number"),
        ("bert", {"max_position_embeddings": {}, "n_positions": "64"}, r"config\.json: n_positions '64', expected a"),
        ("bert", {"pad_token_id": ["0"]}, r"synthetic:tiny@1: transformers makes no \w+ of it \(.*pad_token_id"),
        ("bert", {"hidden_dropout_prob": "no"}, r"transformers makes no \w+ of it \(.*hidden_dropout_prob"),
        ("bert classes", {"layer_norm_eps": None}, r"transformers makes no \w+ of it \(.*layer_norm_eps"),
        ("t5", {"decoder_start_token_id": [0]}, r"config\.json: decoder_start_token_id is \[0\]; a token of the"),
        ("vit", {"image_size": "8"}, r"config\.json: image_size '8', expected a whole number"),
        ("vit", {"patch_size": [4, 2, 1]}, r"config\.json: patch_size \[4, 2, 1\], expected a whole number"),
    ],
)
def test_values_of_another_kind_in_a_config_are_named(
    case: str, changes: dict[str, Any], message: str, folder: Path
) -> None:
    context = made_context(folder, case, config=CONFIGS[case.split()[0]] | changes)
    with pytest.raises(ValueError, match=message) as raised:
        make_task(workload_of(context), context)
    assert "\n" not in str(raised.value)


def test_a_row_ends_with_the_first_of_several_end_tokens(folder: Path) -> None:
    """As the configurations of Llama 3 name them."""
    for ends in (7, [7, 9], [], -1, None):
        config = CONFIGS["llama"] | {"eos_token_id": ends}
        context = made_context(folder, "llama", config=config, data="stories")
        rows, _ = load_examples(workload_of(context), context)
        numbers = np.arange(rows.count)
        count = int((rows.collate(numbers, numbers)["tokens"] == 7).sum())
        assert (count > 40) is (ends in (7, [7, 9]))


def test_a_padding_token_outside_the_vocabulary_is_none(folder: Path) -> None:
    for padding in (-1, CONFIGS["bert"]["vocab_size"]):
        context = made_context(folder, "bert classes", config=CONFIGS["bert"] | {"pad_token_id": padding})
        _, task, found = train(context, 1)
        assert np.isfinite(found).all() and task.config["pad_token_id"] == 0


@pytest.mark.parametrize("told", [{"eos_token_id": 4}, {"eos_token_id": 3}, {}, {"pad_token_id": 4}])
def test_a_text_that_ends_with_the_first_word_is_classified_whole(
    told: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Which is `!` for GPT-2, Llama 3 and Qwen, whose configurations name no padding token."""
    write_inputs(tmp_path / "inputs")
    words = Tokenizer(models.WordLevel({"!": 0, "good": 1, "bad": 2, "?": 3, "</s>": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "inputs" / "words.json"))
    said = ["good !", "bad bad ?", "good bad good !"]
    rows = [f'{{"text": "{text}", "label": "{len(text) % 2}"}}\n' for text in said]
    (tmp_path / "inputs" / "said.ndjson").write_text("".join(rows))
    config = {name: value for name, value in CONFIGS["gpt2"].items() if not name.endswith("token_id")} | told
    context = made_context(tmp_path, "bert classes", config=config, data="said")
    work = workload_of(context)
    task, (train_rows, _) = make_task(work, context), load_examples(work, context)
    inputs = train_rows.collate(np.arange(3), np.arange(3))
    model: Any = task.model.eval()
    with torch.no_grad():
        found = model(input_ids=inputs["tokens"], attention_mask=inputs["seen"]).logits
        for row, text in enumerate(said):
            alone = model.transformer(input_ids=torch.tensor([words.encode(text).ids])).last_hidden_state
            torch.testing.assert_close(found[row], model.score(alone[0, -1]))
    assert task.config["pad_token_id"] == config.get("pad_token_id", task.config["pad_token_id"])


@pytest.mark.parametrize(("image", "patch"), [([8, 8], [4, 2]), ([8, 4], 4), (8, None)])
def test_sizes_of_images_may_be_pairs(image: Any, patch: Any, folder: Path) -> None:
    draw = np.random.default_rng(0)
    height, width = image if isinstance(image, list) else (image, image)
    images = draw.integers(0, 256, (8, height, width, 3), dtype=np.uint8)
    np.savez(folder / "inputs" / "oblong.npz", images=images, labels=np.arange(8) % 2)
    config = {name: value for name, value in CONFIGS["vit"].items() if name != "patch_size" or patch is not None}
    config |= {"image_size": image, "num_channels": None} | ({} if patch is None else {"patch_size": patch})
    patches = {(8, 8): 8, (8, 4): 2}[height, width] if patch is not None else 1
    for data in ("oblong", None):
        context = made_context(folder, "vit", config=config, data=data)
        assert load_examples(workload_of(context), context)[0].positions == patches + 1
    _, _, found = train(
        made_context(folder, "vit", config=config | {"num_channels": 3, "patch_size": patch or 8}, data="oblong"), 1
    )
    assert np.isfinite(found).all()


def write_damaged(path: Path, labels: np.ndarray) -> None:
    """Compressed, with some bytes of the images overwritten."""
    draw = np.random.default_rng(0)
    np.savez_compressed(path, images=draw.integers(0, 4, (3, 64, 64), dtype=np.uint8), labels=labels)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


def test_a_model_without_the_form_is_refused(folder: Path) -> None:
    context = made_context(folder, "t5", config=CONFIGS["bert"])
    with pytest.raises(ValueError, match="synthetic:tiny@1: transformers makes no AutoModelForSeq2SeqLM of it"):
        make_task(workload_of(context), context)
    untyped = made_context(folder, "bert", config={k: v for k, v in CONFIGS["bert"].items() if k != "model_type"})
    with pytest.raises(ValueError, match=r"no AutoModelForMaskedLM of it \(its config.json has no model_type\)"):
        make_task(workload_of(untyped), untyped)
    nothing = ModelManifest(
        identity="synthetic:x@1", source="synthetic", folder="", files={}, config={"model_type": "vit"}
    )
    context = made_context(folder, "llama", manifest=nothing)
    with pytest.raises(ValueError, match=r"config.json names no vocab_size"):
        make_task(workload_of(context), context)
