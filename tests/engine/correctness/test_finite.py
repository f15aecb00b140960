"""Results that are not numbers are found, with their step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.correctness.answers import Consume, sequences_of
from engine.correctness.finite import check_logits, check_tokens, check_vectors
from engine.kernels.rows import NO_WORD
from engine.models.weights import write_folder
from engine.prompts.decoded import Decoded, Encoded
from engine.prompts.tokens import PromptBatch, Prompts, batches
from tests.support.answers.prompted_runs import measurement_alone, measurement_on_rank
from tests.support.rank_pool import RankPool


def decoded(rows: list[list[int]]) -> Decoded:
    return Decoded(0.0, np.zeros(len(rows[0])), torch.tensor(rows))


def test_a_marked_token_names_its_step() -> None:
    check_tokens([])
    check_tokens([decoded([[1, 2, 3]]), decoded([[4, 5, 6]])])
    with pytest.raises(FloatingPointError, match=r"^decode step 2: the logits are not finite numbers"):
        check_tokens([decoded([[1, 2, 3]]), decoded([[4, 5, 6], [7, 8, NO_WORD]])])
    with pytest.raises(FloatingPointError, match=r"^prefill: the logits"):
        check_tokens([decoded([[1, NO_WORD, 3]]), decoded([[NO_WORD, 1, 1]])])


class Scores:
    """Logits that are finite but at one column of the last row, in the prefill or through the cache."""

    def __init__(self, column: int, value: float, cached: bool) -> None:
        self.column, self.value, self.in_cache = column, value, cached
        self.steps: list[int] = []

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        for first in range(0, batch.tokens.shape[1], 2):
            consume(first, self._logits(batch, spoiled=not self.in_cache)[:, first : first + 2])

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        self.steps.append(steps)
        length = batch.tokens.shape[1]
        for column in range(length - steps, length):
            consume(column, self._logits(batch, spoiled=self.in_cache)[:, column : column + 1])

    def _logits(self, batch: PromptBatch, spoiled: bool) -> torch.Tensor:
        logits = torch.zeros(*batch.tokens.shape, 9)
        if spoiled:
            logits[-1, self.column, 3] = self.value
        return logits


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("column", "step"), [(4, "prefill"), (5, "decode step 1"), (6, "decode step 2"), (1, None)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_answers_scored_once_more_find_the_step(column: int, step: str | None, value: float, cached: bool) -> None:
    ids = [[1, 2, 3], [1, 2, 3, 4, 5]]
    piece = batches(ids, 2, torch.device("cpu"))[0]
    sequences = sequences_of(Prompts(0, ids, [None, None], 3), torch.tensor([[5, 6, 7], [5, 6, 7]]))
    scores = Scores(column, value, cached)
    if step is None or (cached and column == 4):  # in the prompt, or never computed: not measured
        check_logits(scores, sequences, piece)
    else:
        with pytest.raises(FloatingPointError, match=f"^{step}: the logits are not finite"):
            check_logits(scores, sequences, piece)
    assert scores.steps == [2]


def test_embeddings_name_their_request() -> None:
    fine, strange = Encoded(0.0, 1.0, torch.ones(2, 3), 2), torch.ones(2, 3)
    strange[1, 2] = float("nan")
    check_vectors([fine, Encoded(0.0, 1.0, None, 2)])
    with pytest.raises(FloatingPointError, match=r"^request 2: the embeddings are not finite numbers"):
        check_vectors([fine, Encoded(0.0, 1.0, strange, 2)])


def with_a_norm_of_nan(model: str, folder: Path) -> ModelManifest:
    """A model whose logits are all NaN."""
    config = ARCHITECTURES[model]
    synthetic = ModelManifest(identity="synthetic:x@0", source="synthetic", folder="", files={}, config=config)
    write_folder(synthetic, folder)
    tensors = load_file(folder / "model.safetensors")
    norm = "decoder.final_layer_norm.weight" if model == "t5-1m" else "model.norm.weight"
    tensors[norm].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelManifest(identity="folder:0", source="folder", folder=str(folder), files={}, config=config)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
@pytest.mark.parametrize("model", ["llama-1m", "t5-1m"])
def test_all_ranks_of_a_launch_fail_with_the_step(
    pool: RankPool, tmp_path: Path, model: str, layout: dict[str, int]
) -> None:
    spoiled = with_a_norm_of_nan(model, tmp_path / "model")
    kind = GenerateWorkload if model == "llama-1m" else Seq2SeqWorkload
    work = kind(num_prompts=4, prompt_tokens=6, new_tokens=7, batch_size=2)
    ranks = pool.run(measurement_on_rank, str(tmp_path), spoiled.model_dump_json(), work, {"layout": Layout(**layout)})
    assert [one.get("error", "none").partition(". ")[0] for one in ranks] == [
        "FloatingPointError: prefill: the logits are not finite numbers"
    ] * 2


def test_a_peer_that_answers_with_no_numbers_fails(tmp_path: Path) -> None:
    spoiled = with_a_norm_of_nan("t5-1m", tmp_path / "model")
    work = Seq2SeqWorkload(num_prompts=3, prompt_tokens=6, new_tokens=4, batch_size=2)
    with pytest.raises(FloatingPointError, match=r"^prefill: the logits are not finite numbers"):
        measurement_alone(tmp_path, spoiled, work, engine="transformers")
