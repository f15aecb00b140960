"""Our engine's answers and the reference's, in one process: ranks are threads, defects are planted on them.

    case = made_case("qwen2", seed=1)                          # a tiny model, prompts, reference with noise
    verdict = case.verdict(Setting(tp=2, dtype="bfloat16"))    # of our engine
    verdict = case.verdict(Setting(tp=2), defect=planted_defects.DEFECTS["missing all-reduce"])

A group of threads stands for the communicator of a group of ranks, which is the only thing that is not the engine's.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.correctness.answers import Scores, Sequence, collect_answers, columns, read_prefill, sequences_of
from engine.correctness.finite import check_tokens
from engine.correctness.noise import converted, measure_noise
from engine.correctness.scoring import ModelScorer
from engine.inference.model import Shard
from engine.inference.pipeline import Replica, micro_batches
from engine.inference.weights import shard_of
from engine.models.weights import DTYPES
from engine.parallel.grid import Grid
from engine.prompts.tokens import Prompts, batches
from reports.correctness.data import Answers, ReductionNoise, answers_of, noise_of
from reports.correctness.judge import CorrectnessVerdict, judge_answers

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Setting:
    """What of our engine is looked at."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    batch: int = 4
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp} pp={self.pp} batch {self.batch} {self.dtype}"


class ThreadGroup:
    """Communicators of threads that stand for ranks: those of one group share one of these."""

    def __init__(self, size: int) -> None:
        self.size, self.ranks = size, tuple(range(size))
        self.barrier = threading.Barrier(size, timeout=600)
        self.slots: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], list[Tensor]] = {}
        self.arrived = threading.Condition()

    def of(self, index: int) -> "ThreadCommunicator":
        """The communicator of one rank."""
        return ThreadCommunicator(self, index)


@dataclass
class ThreadCommunicator:
    """`engine.parallel.communicator.Communicator` between threads."""

    group: ThreadGroup
    index: int
    transport: str = "none"
    listener: Any = None

    @property
    def size(self) -> int:
        return self.group.size

    def all_gather(self, tensor: Tensor) -> Tensor:
        group = self.group
        group.slots[self.index] = tensor
        group.barrier.wait()
        everyone = torch.stack([each.clone() for each in group.slots])
        group.barrier.wait()
        return everyone

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor
        # Summed in float32 and rounded once, as the engine's own operator does.
        return tensor.copy_(self.all_gather(tensor).float().sum(0).to(tensor.dtype))

    def broadcast(self, tensor: Tensor, source_index: int) -> Tensor:
        return tensor.copy_(self.all_gather(tensor)[source_index]) if self.size > 1 else tensor

    def send(self, tensor: Tensor, to_index: int) -> None:
        with self.group.arrived:
            self.group.mail.setdefault((self.index, to_index), []).append(tensor.clone())
            self.group.arrived.notify_all()

    def receive(self, tensor: Tensor, source_index: int) -> Tensor:
        key = (source_index, self.index)
        with self.group.arrived:
            assert self.group.arrived.wait_for(lambda: bool(self.group.mail.get(key)), timeout=600)
            return tensor.copy_(self.group.mail[key].pop(0))


@dataclass
class Rank:
    """One rank that a defect may be planted on, before it decodes."""

    grid: Grid
    shard: Shard
    replica: Replica
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Defect:
    """A planted defect: in a rank's tensors before they are cut, or in what it computes."""

    name: str
    on_tensors: Callable[[dict[str, Tensor], Grid, ModelConfig], None] | None = None
    on_rank: Callable[[Rank], None] | None = None
    on_config: Callable[[ModelConfig], ModelConfig] | None = None
    possible: Callable[[ModelConfig, Setting], bool] = lambda config, setting: True


@dataclass
class Case:
    """A model with its prompts, the reference's answers and its noise."""

    name: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    prompts: list[list[int]]
    new_tokens: int
    reference: Answers
    noise: dict[str, ReductionNoise]
    samples: dict[str, np.ndarray] = field(default_factory=dict)

    def answers(self, setting: Setting, defect: Defect | None = None) -> Answers:
        """Our engine's answers."""
        return answers_of(candidate_samples(self, setting, defect), self.config.vocabulary)

    def verdict(self, setting: Setting, defect: Defect | None = None) -> CorrectnessVerdict:
        """Our engine judged."""
        return judge_answers(self.reference, self.answers(setting, defect), self.noise[setting.dtype])

    def finds(self, setting: Setting, defect: Defect) -> bool:
        """Whether a defect is found: by the verdict, or by answers that are no numbers, which the engine refuses."""
        try:
            return self.verdict(setting, defect).word == "defect"
        except FloatingPointError:
            return True


def candidate_samples(case: Case, setting: Setting, defect: Defect | None) -> dict[str, np.ndarray]:
    """Columns of all ranks, `<rank>/<column>`."""
    return on_threads(setting, lambda grid, groups: _rank_samples(case, setting, defect, grid, groups))


Groups = dict[tuple[int, ...], ThreadGroup]


def on_threads(setting: Setting, samples_of: Callable[[Grid, Groups], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What every rank of a layout gives, each on its thread, as `<rank>/<column>`."""
    grids = [Grid(setting.dp, setting.tp, setting.pp, rank) for rank in range(setting.dp * setting.tp * setting.pp)]
    groups: Groups = {}
    found: dict[str, np.ndarray] = {}
    failures: list[BaseException] = []

    def work(grid: Grid) -> None:
        try:
            samples = samples_of(grid, groups)
            found.update({f"{grid.rank}/{name}": column for name, column in samples.items()})
        except BaseException as error:
            failures.append(error)
            for group in groups.values():
                group.barrier.abort()

    for grid in grids:
        for ranks in (grid.tensor_ranks, grid.pipeline_ranks):
            groups.setdefault(tuple(ranks), ThreadGroup(len(ranks)))
    threads = [threading.Thread(target=work, args=(grid,)) for grid in grids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return found


@torch.inference_mode()
def _rank_samples(
    case: Case, setting: Setting, defect: Defect | None, grid: Grid, groups: Groups
) -> dict[str, np.ndarray]:
    mine = share_of(len(case.prompts), grid.dp_rank, grid.dp)
    prompts = Prompts(mine.start, [case.prompts[index] for index in mine], [None] * len(mine), len(case.prompts))
    requests = batches(prompts.tokens, setting.batch, CPU)
    size = -(-setting.batch // setting.pp)
    tensors = {name: tensor.to(DTYPES[setting.dtype], copy=True) for name, tensor in case.tensors.items()}
    config = case.config
    if defect and defect.on_tensors:
        defect.on_tensors(tensors, grid, config)
    if defect and defect.on_config:
        config = defect.on_config(config)
    tensor_ranks, stages = tuple(grid.tensor_ranks), tuple(grid.pipeline_ranks)
    shard = shard_of(config, grid, groups[tensor_ranks].of(tensor_ranks.index(grid.rank)), tensors)  # type: ignore[arg-type]
    capacity = max(batch.tokens.shape[1] for batch in requests) + case.new_tokens
    rows = max(len(batch.tokens) for batch in requests)
    pipeline = groups[stages].of(stages.index(grid.rank))
    replica = Replica(shard, pipeline, size, rows, capacity)  # type: ignore[arg-type]
    if defect and defect.on_rank:
        defect.on_rank(Rank(grid, shard, replica, tensors))
    decoded = [part for batch in requests for part in replica.decode(batch, case.new_tokens)]
    if grid.is_first_stage or grid.is_last_stage:  # others receive no tokens
        check_tokens(decoded)
    tokens = torch.cat([each.tokens for each in decoded])
    pieces = [piece for batch in requests for piece in micro_batches(batch, size)]
    context: Any = SimpleNamespace(grid=grid)
    return collect_answers(prompts, tokens, replica, pieces, context)[1]


def share_of(count: int, index: int, parts: int) -> range:
    base, extra = divmod(count, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


@cache
def made_case(family: str, seed: int, prompts: int = 10, new_tokens: int = 12) -> Case:
    """A tiny random model, of shapes drawn from the seed, with its reference."""
    model = random_model(family, seed)
    random = np.random.default_rng([seed, 1])
    lengths = random.choice([2, 3, 5, 9, 17, 24, 40, 64], prompts)
    texts = [random.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    return reference_case(f"{family} {seed}", model, texts, new_tokens)


def folder_case(folder: Path, prompts: list[list[int]], new_tokens: int = 12) -> Case:
    """A model of a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return reference_case(folder.name, model, prompts, new_tokens)


def random_model(family: str, seed: int, **options: Any) -> Any:
    """A model of transformers whose weights make attention and norms matter; options: fields of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    random = np.random.default_rng([seed, 0])
    kv_heads = int(random.choice([1, 2, 4]))
    common: dict[str, Any] = {
        "vocab_size": int(random.choice([97, 256, 1000])),
        "hidden_size": int(random.choice([32, 64, 128])),
        "intermediate_size": int(random.choice([64, 96, 176])),
        "num_hidden_layers": int(random.choice([2, 3, 4])),
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": float(random.choice([1e-6, 1e-5])),
        "tie_word_embeddings": bool(random.integers(2)),
        "attn_implementation": "sdpa",
    }
    if family == "llama":
        common |= {"attention_bias": bool(random.integers(2)), "mlp_bias": bool(random.integers(2))}
    if family == "mistral":
        common |= {"sliding_window": int(random.choice([8, 20]))}
    if family == "qwen3":
        common |= {"head_dim": 16}
    config = AutoConfig.for_model(family, **common | options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    spread = float(random.choice([0.5, 1.0, 2.0]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
                parameter.copy_(drawn * spread / parameter.shape[1] ** 0.5)
            elif parameter.dim() == 2:
                parameter.copy_(drawn * 0.3)
            else:
                parameter.copy_(drawn * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


@torch.inference_mode()
def reference_case(
    name: str, model: Any, prompts: list[list[int]], new_tokens: int, dtypes: tuple[Any, ...] = ("float32", "bfloat16")
) -> Case:
    """The reference's answers, one prompt at a time, and its noise."""
    config = ModelConfig.parse(json.loads(json.dumps(model.config.to_dict())))
    decoded = torch.tensor([_greedy(model, ids, new_tokens) for ids in prompts])
    given = Prompts(0, prompts, [None] * len(prompts), len(prompts))
    sequences: list[Sequence] = sequences_of(given, decoded)
    singles = batches(prompts, 1, CPU)
    baseline: list[Scores] = read_prefill(ModelScorer(model), sequences, singles, len(prompts))
    samples = {"answer_prompts": np.arange(len(prompts)), "answer_tokens": decoded.flatten().numpy()}
    samples |= columns(sequences, baseline, [])
    samples |= measure_noise(partial(converted, model), ModelScorer, sequences, baseline, dtypes, 4, CPU)
    ranked = {f"0/{key}": column for key, column in samples.items()}
    reference = answers_of(ranked, config.vocabulary)
    noise = {dtype: noise_of(ranked, reference, dtype) for dtype in dtypes}
    assert all(noise.values())
    tensors = {
        key: value.detach().clone() for key, value in model.state_dict().items() if key in config.tensor_shapes()
    }
    return Case(name, config, tensors, prompts, new_tokens, reference, noise, ranked)  # type: ignore[arg-type]


def _greedy(model: Any, ids: list[int], new_tokens: int) -> list[int]:
    known = torch.tensor([ids])
    found, past = [], None
    for _ in range(new_tokens):
        out = model(input_ids=known, past_key_values=past, use_cache=True)
        past, known = out.past_key_values, out.logits[:, -1:].argmax(-1)
        found.append(int(known))
    return found
