"""The seq2seq workload, whole: tiny T5 models on one rank and two, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.correctness.answers import FORCED_TOKENS
from engine.models.weights import write_folder
from reports.correctness.data import Answers, answers_of, noise_of
from reports.correctness.judge import judge_answers
from tests.support.answers.prompted_runs import (
    launched,
    made_context,
    made_measurement,
    measurement_alone,
    measurement_on_rank,
)
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    name: ModelManifest(
        identity=f"synthetic:{name}@1", source="synthetic", folder="", files={}, config=ARCHITECTURES[name]
    )
    for name in ("t5-1m", "t5-gated-1m")
}
WORDS = 2048


def work(**fields: Any) -> Seq2SeqWorkload:
    return Seq2SeqWorkload(**{"num_prompts": 5, "prompt_tokens": 11, "batch_size": 2, "new_tokens": 6} | fields)


def answers(ranks: list[dict[str, np.ndarray]]) -> Answers:
    return answers_of(
        {f"{rank}/{name}": column for rank, one in enumerate(ranks) for name, column in one.items()}, WORDS
    )


def test_every_sample_and_figure_is_there(tmp_path: Path) -> None:
    outcome = measurement_alone(tmp_path, TINY["t5-1m"], work(answers=True))
    sizes = {name: len(column) for name, column in outcome.samples.items()}
    assert {name: size for name, size in sizes.items() if not name.startswith(("answer", "cached"))} == {
        "warmup_pass_seconds": 1,
        "warmup_ttft_seconds": 3,
        "pass_seconds": 2,
        "ttft_seconds": 6,
        "request_seconds": 6,
        "gap_seconds": 30,
        "batch_sequences": 6,
    }
    requests, gaps = outcome.samples["request_seconds"], outcome.samples["gap_seconds"].reshape(6, 5).sum(1)
    np.testing.assert_allclose(outcome.samples["ttft_seconds"] + gaps, requests, rtol=1e-9)
    # Each source is said again after the first token: 11 likelihoods and 12 rows of logits of each.
    assert sizes["answer_nll"] == 5 * 11 and sizes["answer_logits"] == 5 * 12 * WORDS
    assert sizes["answer_tokens"] == sizes["answer_gaps"] == 5 * 6 and sizes["cached_nll"] == 5 * 7
    assert (outcome.samples["answer_gaps"] == 0).all()
    figures = outcome.figures
    assert (figures["num_prompts"], figures["prompt_tokens"], figures["new_tokens"], figures["passes"]) == (5, 55, 6, 2)
    assert float(figures["load_seconds"] or 0) > 0 and figures["decode_path"] in ("recorded", "steps")


@pytest.mark.parametrize("model", sorted(TINY))
def test_two_ranks_agree_with_transformers(pool: RankPool, tmp_path: Path, model: str) -> None:
    mine = work(answers=True)
    noisy = mine.model_copy(update={"noise_dtypes": ("float32",), "noise_orders": 3})
    reference = measurement_alone(tmp_path, TINY[model], noisy, engine="transformers").samples
    base = answers([reference])
    noise = noise_of({f"0/{name}": column for name, column in reference.items()}, base, "float32")
    assert len(set(map(tuple, base.tokens.values()))) > 1
    for layout in ({"tp": 2}, {"pp": 2}, {"dp": 2}):
        ranks = pool.run(
            measurement_on_rank, str(tmp_path), TINY[model].model_dump_json(), mine, {"layout": Layout(**layout)}
        )
        verdict = judge_answers(base, answers([one["samples"] for one in ranks]), noise)
        assert verdict.word == "agrees", (layout, verdict.reason)
        assert verdict.ladder is not None and verdict.ladder.prompts_equal == 5


@pytest.mark.slow
def test_ranks_that_are_launched_find_each_other(tmp_path: Path) -> None:
    asked = work(answers=True, num_prompts=2)
    alone = measurement_alone(tmp_path, TINY["t5-1m"], asked).samples
    ranks = launched(tmp_path, TINY["t5-1m"], asked, layout=Layout(pp=2))
    np.testing.assert_array_equal(ranks[1]["answer_tokens"], alone["answer_tokens"])
    np.testing.assert_allclose(ranks[1]["answer_logits"], alone["answer_logits"], atol=1e-4)


def test_long_sources_are_said_in_part_and_short_answers_have_room(tmp_path: Path) -> None:
    """The cache holds what is said for the judge, and the encoder knows no longest text."""
    samples = measurement_alone(
        tmp_path, TINY["t5-1m"], work(num_prompts=1, prompt_tokens=600, new_tokens=2, answers=True)
    ).samples
    assert len(samples["answer_nll"]) == FORCED_TOKENS and len(samples["answer_tokens"]) == 2


def test_a_source_ends_as_its_tokenizer_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(TINY["t5-1m"], folder)
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(["a cat sat on a mat"], trainers.WordLevelTrainer(special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    manifest = TINY["t5-1m"].model_copy(update={"folder": str(folder), "source": "folder", "identity": "folder:1"})
    (tmp_path / "inputs").mkdir()
    texts = ["a cat", "a cat sat on a mat"]
    (tmp_path / "inputs" / "abc.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    asked = Seq2SeqWorkload(prompts="abc", batch_size=2, new_tokens=3, answers=True)
    outcome = measurement_alone(tmp_path, manifest, asked)
    assert outcome.figures["prompt_tokens"] == 3 + 7
    # Filled up in one batch, or alone: the same answers.
    alone = measurement_alone(tmp_path, manifest, asked.model_copy(update={"batch_size": 1}))
    np.testing.assert_array_equal(outcome.samples["answer_tokens"], alone.samples["answer_tokens"])
    np.testing.assert_allclose(outcome.samples["answer_logits"], alone.samples["answer_logits"], atol=1e-5)
    # Of a given length, the end stays the end.
    cut = measurement_alone(tmp_path, manifest, asked.model_copy(update={"prompt_tokens": 5}))
    assert cut.figures["prompt_tokens"] == 10


def test_a_memory_pass_runs_one_request(tmp_path: Path) -> None:
    from engine.workloads import seq2seq

    measurement, job = made_measurement(tmp_path, work(answers=True), "memory")
    outcome = seq2seq.run(measurement, made_context(tmp_path, TINY["t5-1m"], job))
    assert outcome.samples == {} and outcome.figures["passes"] == 1


def test_wrong_kinds_are_refused_by_name(tmp_path: Path) -> None:
    for asked in (GenerateWorkload(), EncodeWorkload()):
        with pytest.raises(
            ValueError, match=rf"t5-1m@1 is an encoder-decoder \(t5\), which {asked.kind} .* use seq2seq"
        ):
            measurement_alone(tmp_path, TINY["t5-1m"], asked)
