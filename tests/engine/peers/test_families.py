"""Families that this engine lacks: transformers measures and answers for them, and what is not known is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from configs.plans.model_manifest import ModelManifest
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.peers.families import PeerModel, text_model
from reports.correctness.data import answers_of, noise_of
from reports.correctness.embeddings import embedding_noise_of, embeddings_of
from reports.correctness.embeddings_judge import judge_embeddings
from reports.correctness.judge import judge_answers
from tests.support.answers.peer_runs import WORDS, context_of, made, outcome_of, ranked

pytestmark = pytest.mark.usefixtures("one_thread")

DECODERS: dict[str, dict[str, Any]] = {
    "falcon": {},  # rotary positions, all heads share keys and values, layers in parallel
    "bloom": {},  # positions by a bias on the scores
    "phi": {"intermediate_size": 96, "max_position_embeddings": 128},
    "stablelm": {"intermediate_size": 96, "max_position_embeddings": 128, "num_key_value_heads": 4},
}
WORK: dict[str, Any] = {"num_prompts": 3, "batch_size": 2, "prompt_tokens": 11, "new_tokens": 5, "answers": True}


@pytest.mark.parametrize("family", DECODERS)
def test_a_family_that_the_engine_lacks_is_measured_and_judged(family: str, tmp_path: Path) -> None:
    manifest = made(family, tmp_path / "model", **DECODERS[family])
    dtypes = ("float32", "bfloat16")
    reference = outcome_of(tmp_path, manifest, GenerateWorkload(**WORK | {"batch_size": 1}, noise_dtypes=dtypes))
    known = answers_of(ranked(reference), WORDS)
    for dtype in dtypes:
        candidate = outcome_of(tmp_path, manifest, GenerateWorkload(**WORK), dtype=dtype)
        verdict = judge_answers(known, answers_of(ranked(candidate), WORDS), noise_of(ranked(reference), known, dtype))  # type: ignore[arg-type]
        assert verdict.word == "agrees", verdict.reason
        assert candidate.figures["num_prompts"] == 3 and len(candidate.samples["gap_seconds"])


def test_what_the_configuration_does_not_say_is_no_limit(tmp_path: Path) -> None:
    manifest = made("bloom", tmp_path / "model")
    model = text_model(context_of(tmp_path, manifest, GenerateWorkload(**WORK))[1], "generate")
    assert isinstance(model, PeerModel)
    assert (model.family, model.vocabulary, model.positions) == ("bloom", WORDS, "relative")
    outcome = outcome_of(tmp_path, manifest, GenerateWorkload(**WORK | {"prompt_tokens": 300}))
    assert outcome.figures["model_max_positions"] is None


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("falcon", {"alibi": True, "max_position_embeddings": 16}),
        ("bloom", {"seq_length": 16}),  # of the published files; transformers keeps what it does not read
        ("umt5", {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "n_positions": 16}),
    ],
)
def test_positions_that_are_distances_have_no_limit(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """ALiBi and T5's buckets are made for sequences beyond those of the training, which config.json names."""
    manifest = made(family, tmp_path / "model", **options)
    assert {name: manifest.config.get(name) for name in options} == options
    kind = Seq2SeqWorkload if family == "umt5" else GenerateWorkload
    outcome = outcome_of(tmp_path, manifest, kind(**WORK | {"prompt_tokens": 40}))
    assert outcome.figures["model_max_positions"] is None and len(outcome.samples["answer_tokens"]) == 15


def test_texts_for_an_encoder_without_a_known_limit_are_cut_where_the_author_says(tmp_path: Path) -> None:
    manifest = made("bloom", tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"a": 5, "b": 6, "?": 7}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a b a b a"}\n')
    work = EncodeWorkload(prompts="p", num_prompts=1)
    told, of_tokenizer = tmp_path / "model" / "sentence_bert_config.json", tmp_path / "model" / "tokenizer_config.json"
    for limit, longest, figures in (
        (None, None, (5, 0)),
        (3, None, (3, 1)),
        (3, 2, (3, 1)),
        (None, 2, (2, 1)),  # as sentence-transformers 6 saves a model
        (None, 10**30, (5, 0)),  # transformers' word for none
    ):
        told.write_text(json.dumps({"max_seq_length": limit} if limit else {"module_output_name": "token_embeddings"}))
        of_tokenizer.write_text(json.dumps({"model_max_length": longest} if longest else {}))
        found = outcome_of(tmp_path, manifest, work).figures
        assert (found["max_prompt_tokens"], found["truncated_prompts"]) == figures


def test_a_state_space_model_has_answers_without_a_cache(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2)).save_pretrained(
        tmp_path / "model"
    )
    read = json.loads((tmp_path / "model" / "config.json").read_text())
    manifest = ModelManifest(
        identity="folder:mamba", source="folder", folder=str(tmp_path / "model"), files={}, config=read
    )
    outcome = outcome_of(tmp_path, manifest, GenerateWorkload(**WORK | {"batch_size": 1}))
    found = answers_of(ranked(outcome), WORDS)
    assert len(found.tokens) == 3 and found.prefill.nll and not found.cached.nll


def test_an_encoder_decoder_and_the_wrong_workload(tmp_path: Path) -> None:
    options = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    manifest = made("bart", tmp_path / "model", **options, decoder_start_token_id=2)
    outcome = outcome_of(tmp_path, manifest, Seq2SeqWorkload(**WORK))
    assert outcome.figures["model_max_positions"] == 64 and len(outcome.samples["answer_tokens"]) == 15
    with pytest.raises(ValueError, match=r"folder:bart \(bart\) has no generate model .* use seq2seq"):
        outcome_of(tmp_path, manifest, GenerateWorkload(**WORK))
    with pytest.raises(
        ValueError, match=r"has 65 tokens; the model takes 64 .*set workload.prompt_tokens to at most 64"
    ):
        outcome_of(tmp_path, manifest, Seq2SeqWorkload(**WORK | {"prompt_tokens": 65, "new_tokens": 1}))
    with pytest.raises(ValueError, match=r"workload.new_tokens: got 65; the model takes 64 .*at most 64"):
        outcome_of(tmp_path, manifest, Seq2SeqWorkload(**WORK | {"new_tokens": 65}))


def test_sources_of_an_encoder_decoder_may_fill_its_positions(tmp_path: Path) -> None:
    """Its answers lie in a stack of their own, whose forced input must fit too."""
    options = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 24}
    manifest = made("bart", tmp_path / "model", **options, decoder_start_token_id=2)
    work = WORK | {"prompt_tokens": 24, "new_tokens": 24}
    reference = outcome_of(tmp_path, manifest, Seq2SeqWorkload(**work | {"batch_size": 1}, noise_dtypes=("float32",)))
    candidate = outcome_of(tmp_path, manifest, Seq2SeqWorkload(**work))
    known = answers_of(ranked(reference), WORDS)
    assert {len(nll) for nll in known.prefill.nll.values()} == {23}
    noise = noise_of(ranked(reference), known, "float32")
    assert judge_answers(known, answers_of(ranked(candidate), WORDS), noise).word == "agrees"


def test_an_encoder_with_positions_of_its_own_takes_longer_sources_than_answers(tmp_path: Path) -> None:
    """LED's sources were held to no limit at all; each is filled up to a multiple of its attention window."""
    options = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "attention_window": [8, 8]}
    options |= {"max_encoder_position_embeddings": 44, "max_decoder_position_embeddings": 20}
    manifest = made("led", tmp_path / "model", **options)
    work = WORK | {"prompt_tokens": 40, "new_tokens": 19}
    outcome = outcome_of(tmp_path, manifest, Seq2SeqWorkload(**work))
    assert outcome.figures["model_max_positions"] == 20 and len(outcome.samples["answer_tokens"]) == 57
    with pytest.raises(
        ValueError, match=r"has 41 tokens; the model takes 40 .*set workload.prompt_tokens to at most 40"
    ):
        outcome_of(tmp_path, manifest, Seq2SeqWorkload(**work | {"prompt_tokens": 41}))
    with pytest.raises(ValueError, match=r"workload.new_tokens: got 21; the model takes 20"):
        outcome_of(tmp_path, manifest, Seq2SeqWorkload(**work | {"new_tokens": 21}))


def test_an_answer_begins_where_transformers_begins_it(tmp_path: Path) -> None:
    """mBART names no decoder_start_token_id: `generate` begins with its first token of a text; without it, nowhere."""
    options = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    manifest = made("mbart", tmp_path / "model", **options, bos_token_id=5)
    work = Seq2SeqWorkload(**WORK)
    assert text_model(context_of(tmp_path, manifest, work)[1], "seq2seq").start_token == 5
    verdict = judged_in_batches("mbart", tmp_path / "judged", {"new_tokens": 12}, Seq2SeqWorkload, **options)
    assert verdict.word == "agrees", verdict.reason
    manifest = made("mbart", tmp_path / "none", **options, bos_token_id=None)
    with pytest.raises(
        ValueError, match=r"folder:mbart: config\.json names neither decoder_start_token_id nor bos_tok"
    ):
        outcome_of(tmp_path, manifest, work)


def test_a_roberta_takes_fewer_tokens_than_its_table_of_positions_has_rows(tmp_path: Path) -> None:
    options = {"intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 1}
    manifest = made("roberta", tmp_path / "model", **options)
    work = {"num_prompts": 2, "batch_size": 2}
    outcome = outcome_of(tmp_path, manifest, EncodeWorkload(**work, prompt_tokens=64))
    assert outcome.figures["num_prompts"] == 2
    with pytest.raises(ValueError, match="has 65 tokens; the model takes 64"):
        outcome_of(tmp_path, manifest, EncodeWorkload(**work, prompt_tokens=65))


def judged_in_batches(
    family: str, folder: Path, work: dict[str, Any], kind: type[PromptedWorkload], **options: Any
) -> Any:
    """The verdict on a batch of prompts of 3, 11 and 7 tokens, by the same prompts one at a time."""
    manifest = made(family, folder / "model", **options)
    lines = [list(range(5, 5 + length)) for length in (3, 11, 7)]
    (folder / "p.jsonl").write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in lines))
    work = work | {"prompts": "p", "num_prompts": 3, "answers": True}
    reference = ranked(outcome_of(folder, manifest, kind(**work, batch_size=1, noise_dtypes=("float32",))))
    candidate = ranked(outcome_of(folder, manifest, kind(**work, batch_size=3)))
    if kind is EncodeWorkload:
        encoded = embeddings_of(reference)
        noise = embedding_noise_of(reference, encoded, "float32")
        return judge_embeddings(encoded, embeddings_of(candidate), noise)
    known = answers_of(reference, WORDS)
    return judge_answers(known, answers_of(candidate, WORDS), noise_of(reference, known, "float32"))


@pytest.mark.parametrize("family", ["roberta", "mpnet", "longformer", "mra", "electra"])
def test_an_encoder_counts_positions_in_a_padded_batch_from_its_own_first(family: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 1}
    options |= {"attention_window": [8, 8]} if family == "longformer" else {}
    verdict = judged_in_batches(family, tmp_path, {}, EncodeWorkload, **options)
    assert verdict.word == "agrees", verdict.reason


def test_an_encoder_decoder_reads_sources_of_several_lengths_from_their_first_position(tmp_path: Path) -> None:
    options = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2}
    verdict = judged_in_batches("bart", tmp_path, {"new_tokens": 12}, Seq2SeqWorkload, **options)
    assert verdict.word == "agrees" and verdict.ladder.prompts_equal == 3, verdict.reason


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "no-such"}, "no-such"),
        ({}, "model_type"),
        ({"model_type": "stablelm", "hidden_size": "64"}, "hidden_size"),
    ],
)
def test_a_family_that_transformers_lacks_is_refused_by_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    manifest = ModelManifest(
        identity="folder:x", source="folder", folder=str(tmp_path / "model"), files={}, config=config
    )
    with pytest.raises(ValueError, match=r"folder:x: transformers .* cannot read config\.json") as raised:
        text_model(context_of(tmp_path, manifest, GenerateWorkload(**WORK))[1], "generate")
    assert words in str(raised.value) and len(str(raised.value)) < 400


def changed(manifest: ModelManifest, name: str, tensor: Any = None) -> None:
    """Take a tensor out of the model's file, or put another in its place."""
    from safetensors.torch import load_file, save_file

    path = Path(manifest.folder) / "model.safetensors"
    tensors = load_file(path)
    assert name in tensors
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), path, metadata={"format": "pt"})


_STABLELM = DECODERS["stablelm"]
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
_ROBERTA = {"intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 1}


@pytest.mark.parametrize(
    ("family", "options", "workload", "name"),
    [
        ("stablelm", _STABLELM, GenerateWorkload(**WORK), "model.layers.1.mlp.up_proj.weight"),
        ("stablelm", _STABLELM, GenerateWorkload(**WORK), "lm_head.weight"),
        ("bloom", {}, GenerateWorkload(**WORK), "transformer.word_embeddings.weight"),  # tied: the head with it
        ("bart", _BART, Seq2SeqWorkload(**WORK), "model.decoder.layers.0.encoder_attn.k_proj.bias"),
        ("roberta", _ROBERTA, EncodeWorkload(num_prompts=2, batch_size=2), "roberta.encoder.layer.0.output.dense.bias"),
    ],
)
def test_weights_that_are_in_no_file_are_named_and_not_drawn(
    family: str, options: dict[str, Any], workload: Any, name: str, tmp_path: Path
) -> None:
    manifest = made(family, tmp_path / "model", **options)
    changed(manifest, name)
    for mode in ("eager", "static") if family == "stablelm" else ("eager",):
        with pytest.raises(ValueError, match=rf"model: tensor \S*{name.removeprefix('roberta.')} is missing, which "):
            outcome_of(tmp_path, manifest, workload, engine_mode=mode)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    manifest = made("stablelm", tmp_path / "model", **_STABLELM)
    changed(manifest, "model.norm.weight", torch.ones(32))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has the shape \(32,\); config\.json asks for \(64,\)"):
        outcome_of(tmp_path, manifest, GenerateWorkload(**WORK))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_without_a_word_on_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    manifest, name = made("stablelm", tmp_path / "model", **_STABLELM), "model.layers.1.mlp.up_proj.weight"
    changed(manifest, name, torch.ones(96, 64).to(dtype))
    for mode in ("eager", "static"):
        with pytest.raises(
            ValueError, match=rf"model\.safetensors: tensor {name} is \w+, and config\.json has no quant"
        ):
            outcome_of(tmp_path, manifest, GenerateWorkload(**WORK), engine_mode=mode)
