"""T5 in float16: its feed-forward's sums are beyond the range of 16 bits, and float32 as in transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from configs.plans.model_manifest import ModelManifest
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.compression import Compressor
from engine.inference.weights import LoadedShard, read_shard
from engine.models.weights import weights_hash
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.peers.folder_model import from_folder
from engine.planner.families import read_architecture
from engine.planner.memory.inference import inference_memory
from engine.planner.setup import InferenceSetup
from tests.support.answers.prompted_runs import measurement_alone, measurement_on_rank
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TOKENS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module", params=["t5-1m", "t5-gated-1m"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelManifest:
    """A model whose stream exceeds 65,504, the largest number of float16, as that of a published T5 does."""
    import transformers

    folder, config = tmp_path_factory.mktemp("t5") / "model", dict(ARCHITECTURES[request.param])
    torch.manual_seed(0)
    made = transformers.T5ForConditionalGeneration(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(".wo.weight"):
                weight.normal_(std=3e4)
    made.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity="folder:t5", source="folder", folder=str(folder), files={}, config=config)


def loaded(model: ModelManifest, **options: Any) -> LoadedShard:
    return read_shard(model, Grid(1, 1, 1, 0), Communicator((0,), 0), torch.float16, CPU, **options)


@torch.inference_mode()
def test_float16_follows_transformers_where_sums_exceed_it(model: ModelManifest) -> None:
    reference = from_folder(Path(model.folder), "seq2seq", torch.float16)
    start = torch.zeros((2, 1), dtype=torch.int64)
    forced = torch.cat([start, TOKENS[:, :7]], dim=1)
    streams: list[float] = []
    reference.decoder.block[-1].register_forward_hook(lambda *told: streams.append(float(told[-1][0].abs().max())))
    expected = reference(input_ids=TOKENS, decoder_input_ids=forced).logits.float()
    assert streams[0] > 65504 and expected.isfinite().all()
    ours = loaded(model)
    assert ours.digest == weights_hash(reference)
    encoder, decoder = ours.shards["encoder"], ours.shards["decoder"]
    assert (decoder.dtype, decoder.stream_dtype) == (torch.float16, torch.float32)
    cache = decoder.new_cache(2, 8)
    cache.set_source(encoder.encode(TOKENS), None)
    steps = [
        decoder.forward(forced[:, :5], cache),
        *(decoder.forward(forced[:, at : at + 1], cache) for at in (5, 6, 7)),
    ]
    found = decoder.head(torch.cat(steps, dim=1)).float()
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


def test_quantised_products_stay_narrow(model: ModelManifest) -> None:
    compressor = Compressor(("int8",), torch.bfloat16, CPU)
    assert compressor.quantises and not Compressor((), torch.float16, CPU).quantises
    shard = read_shard(model, Grid(1, 1, 1, 0), Communicator((0,), 0), torch.bfloat16, CPU, compressor=compressor).shard
    assert shard.stream_dtype is shard.dtype is torch.bfloat16


def test_stages_hand_the_wide_stream_on(model: ModelManifest, pool: RankPool, tmp_path: Path) -> None:
    """A stage that received float16 would go on with infinities."""
    work = Seq2SeqWorkload(num_prompts=3, prompt_tokens=9, batch_size=2, new_tokens=5, answers=True)
    alone = measurement_alone(tmp_path, model, work, dtype="float16").samples["answer_tokens"]
    cell = {"layout": Layout(pp=2), "dtype": "float16"}
    ranks = pool.run(measurement_on_rank, str(tmp_path), model.model_dump_json(), work, cell)
    assert "error" not in ranks[-1], ranks[-1]
    assert np.array_equal(ranks[-1]["samples"]["answer_tokens"], alone)


def test_a_plan_counts_the_wide_weights(model: ModelManifest) -> None:
    architecture = read_architecture(model.config)
    device = accelerator("v100-16gb")
    setup = InferenceSetup(
        architecture=architecture, machine=Machine(name="m", accelerator=device), layout=Layout(), prompt_tokens=8,
        new_tokens=8, compute="float16", weights="float16",
    )  # fmt: skip
    narrow = inference_memory(setup.replace(compute="bfloat16", weights="bfloat16")).parameters
    products = [one for one in architecture.weights if one.name == "mlp.down"]
    assert narrow == 2 * architecture.parameters
    assert inference_memory(setup).parameters - narrow == 2 * sum(one.size * one.copies for one in products) > 0
