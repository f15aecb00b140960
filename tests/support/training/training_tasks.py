"""Training tasks on small models and data, in one process or on the ranks of a pool; no transformers imported here."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from configs.common.execution import Dtype, Layout, Strategy
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.training.data.validation import evaluate
from engine.training.shares import make_feed, make_validation
from engine.training.task_types import make_task
from engine.training.trainer import Trainer, TrainerOptions
from engine.training.trainers import STRATEGIES

CPU = torch.device("cpu")
# What torch's counter does not know, by its rules for the same kernel on a GPU: two products forward, five backward.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * math.prod(q) * k[2],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, *_, **__: 10 * math.prod(q) * k[2]
    ),
}
VOCABULARY = 320
_SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": ARCHITECTURES["llama-1m"]
    | _SMALL
    | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2},
    "gpt2": ARCHITECTURES["gpt2-1m"] | {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2},
    "bert": ARCHITECTURES["bert-1m"]
    | _SMALL
    | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "hidden_dropout_prob": 0.1},
    "t5": ARCHITECTURES["t5-1m"]
    | {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "d_kv": 8, "dropout_rate": 0.1},
    "vit": ARCHITECTURES["vit-2m"]
    | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"task": "causal_lm", "data": "text"},
    "gpt2": {"task": "causal_lm", "data": "stories"},
    "bert": {"task": "masked_lm", "data": "text"},
    "t5": {"task": "seq2seq", "data": "pairs"},
    "bert classes": {"task": "text_classification", "data": "reviews"},
    "vit": {"task": "image_classification", "data": "squares"},
}
"""One of each task, both kinds of models for causal_lm; the name's first word is a configuration's."""


def write_inputs(folder: Path) -> None:
    """Learnable data of every kind: texts, pairs of unequal length, reviews of two classes, images of two."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"def add_{n}(a, b):\n    return a + b + {n % 7}\n\n" for n in range(120))
    (folder / "text.txt").write_text(text)
    rows = {
        "stories": [{"text": f"The {n % 5}th story ends here." + " And on." * (n % 3)} for n in range(60)],
        "pairs": [{"source": "count " + "to " * (n % 6) + str(n), "target": "one " * (1 + n % 5)} for n in range(40)],
        "reviews": [
            {"text": ("a fine day " if n % 3 else "so dull ") * (1 + n % 4), "label": "good" if n % 3 else "bad"}
            for n in range(40)
        ],
    }
    for name, some in rows.items():
        (folder / f"{name}.ndjson").write_text("".join(json.dumps(row) + "\n" for row in some))
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 40)
    images = draw.integers(0, 60, (40, 8, 8), dtype=np.uint8) + (labels * 150).astype(np.uint8)[:, None, None]
    np.savez(folder / "squares.npz", images=images, labels=labels, label_names=np.array(["dark", "light"]))
    write_tokenizer(text, folder / "words.json")


def write_tokenizer(text: str, path: Path) -> None:
    """Of bytes and a few words, with `[CLS]`, `[SEP]` and `[MASK]`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "</s>", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - 10, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing("$A [SEP]", special_tokens=[("[SEP]", 3)])
    tokenizer.save(str(path))


def made_context(
    folder: Path,
    case: str,
    world_size: int = 1,
    rank: int = 0,
    manifest: ModelManifest | None = None,
    measurements: int = 1,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    strategy: Strategy = "none",
    dtype: Dtype = "float32",
    **work: Any,
) -> Context:
    """A launch that measurements one cell of a case; its inputs lie in `folder`/inputs."""
    defaults = {"tokenizer": "words", "global_batch_size": 8, "sequence_length": 16, "learning_rate": 3e-3}
    layout = Layout(dp=world_size, strategy=strategy)
    cell = Cell(model="m", workload=TrainWorkload(**defaults | CASES[case] | work), layout=layout, dtype=dtype)
    job = Job(
        name="job",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(seed=seed),
        measurements=tuple(Measurement(cell=cell, repeat=repeat, attempt=1) for repeat in range(measurements)),
        ranks_per_node=world_size,
        timeout_seconds=60,
        inputs=str(folder / "inputs"),
        cache=str(folder / "cache"),
    )
    made = ModelManifest(
        identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=config or CONFIGS[case.split()[0]]
    )
    return Context(job, JobPaths(folder), rank, world_size, CPU, manifest or made, lambda: None)


def workload_of(context: Context) -> TrainWorkload:
    """Of its first cell."""
    work = context.job.cell.workload
    assert isinstance(work, TrainWorkload)
    return work


def train(context: Context, steps: int) -> tuple[Trainer, Any, np.ndarray]:
    """The trainer and task after so many steps; [steps, 2] of this rank: its part of the loss, gradient norm."""
    work, options = workload_of(context), TrainerOptions.of(context.job.cell)
    task = make_task(work, context)
    feed = make_feed(work, options, context, task)
    trainer = STRATEGIES[options.strategy](task, options, context)
    found = []
    for step in range(steps):
        batches, summed = feed.step(step), 0.0
        for number, batch in enumerate(batches, start=1):
            loss = trainer.forward(batch)
            trainer.backward(loss, batch, last=number == len(batches))
            summed += loss.item() * batch.share
        found.append((summed, trainer.step(work.learning_rate).norm))
    return trainer, task, np.array(found)


def train_on_rank(
    rank: int, folder: str, case: str, strategy: Strategy, steps: int, micro: int, data: str | None = None
) -> np.ndarray:
    """For a pool of two ranks. data: other data than the case's."""
    work = {"micro_batch_size": micro} | ({"data": data} if data else {})
    trainer, _, found = train(made_context(Path(folder), case, 2, rank, strategy=strategy, **work), steps)
    trainer.close()
    return found


_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2": ("vit", _TINY | {"model_type": "dinov2", "image_size": 8, "patch_size": 4}),
    "esm": ("bert", _TINY | _SMALL | {"model_type": "esm", "mask_token_id": 4, "pad_token_id": 1}),
}
"""Models with weights that the task (of the case) does not use: a token for masked patches, a head for contacts."""
MARIAN: dict[str, Any] = {
    "model_type": "marian", "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
"""Of a source and a target, with frozen tables of positions."""


def left_out_on_rank(rank: int, folder: str, kind: str, steps: int) -> np.ndarray:
    """As `train_on_rank`, of a model with weights that its task does not use."""
    case, config = LEFT_OUT[kind]
    trainer, _, found = train(
        made_context(Path(folder), case, 2, rank, config=config, strategy="ddp", micro_batch_size=2), steps
    )
    trainer.close()
    return found


def weights_after_decay(rank: int, folder: str, strategy: Strategy) -> dict[str, np.ndarray]:
    """Of Marian, after three steps that let all trained weights decay by a tenth; {} on the second rank."""
    context = made_context(Path(folder), "t5", 2, rank, config=MARIAN, strategy=strategy, weight_decay=10.0)
    trainer, _, _ = train(context, 3)
    whole = {name: tensor.numpy().copy() for name, tensor in trainer.whole_model().items()}
    trainer.close()
    return whole


MOBILENET: dict[str, Any] = {
    "model_type": "mobilenet_v2", "image_size": 8, "depth_multiplier": 0.35, "finegrained_output": False,
}  # fmt: skip
"""A classifier of images with batch norms."""


SWIN: dict[str, Any] = {
    "model_type": "swin", "image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
    "window_size": 2,
}  # fmt: skip
"""A classifier of images that does not cast them to the type of its weights."""


def images_in_16_bits(
    rank: int, folder: str, config: dict[str, Any], strategies: list[Strategy]
) -> dict[str, tuple[np.ndarray, float]]:
    """By strategy, in bfloat16: as `train_on_rank` of two steps; and the loss of the last rows without gradients."""
    found = {}
    for strategy in strategies:
        context = made_context(
            Path(folder), "vit", 2, rank, config=config, strategy=strategy, dtype="bfloat16", heldout_share=0.2
        )
        trainer, task, curve = train(context, 2)
        work, options = workload_of(context), TrainerOptions.of(context.job.cell)
        sums = evaluate(trainer, task, make_validation(work, options, context, task), context, options)
        trainer.close()
        found[strategy] = curve, sums["loss"]
    return found


def refused_in_16_bits(rank: int, folder: str, config: dict[str, Any], strategy: Strategy) -> str:
    """What is said of a strategy, on each rank."""
    try:
        images_in_16_bits(rank, folder, config, [strategy])
    except NotImplementedError as error:
        return str(error)
    return ""


def running_means(rank: int, folder: str, strategy: Strategy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a norm after a step: this rank's own, those it evaluates with, and those that rank 0 would export."""
    trainer, _, _ = train(made_context(Path(folder), "vit", 2, rank, config=MOBILENET, strategy=strategy), 1)

    def first() -> np.ndarray:
        found = next(one for name, one in trainer.module.named_buffers() if name.endswith("running_mean"))
        return found.numpy().copy()

    own = first()
    with trainer.evaluating():
        evaluated = first()
    whole = trainer.whole_model()
    exported = next((one.numpy() for name, one in whole.items() if name.endswith("running_mean")), evaluated)
    result = own, evaluated, exported.copy()
    trainer.close()
    return result
