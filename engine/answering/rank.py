"""The process that computes: requests in lines of JSON on standard input, answers on standard output.

    python -m engine.answering.rank SETTINGS_JSON
    {"id": 1, "tokens": [[101, 7592, 102]], "new_tokens": 0}     ->  {"id": 1, "vectors": [[...]]}
    {"id": 2, "tokens": [[363, 1]], "new_tokens": 8}             ->  {"id": 2, "tokens": [[...]]}

An encoder's vectors are the mean of the last hidden states, or the first where the model's folder says so
(1_Pooling/config.json), of length 1. One batch at a time; it ends with its parent.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.rank.processes import die_with_parent, leave, place_from_environment

if TYPE_CHECKING:
    from configs.families.config import ModelConfig
    from configs.serving.settings import ServingSettings
    from engine.context import Context

AnswerPrompts = Callable[[list[list[int]], int], dict[str, Any]]


def encodes(config: "ModelConfig") -> bool:
    """Return whether a model answers with vectors, as encoders without a decoder do."""
    from configs.families.tensors import layer_stacks

    return "decoder" not in layer_stacks(config)


def encoder_answers(settings: "ServingSettings", context: "Context") -> AnswerPrompts:
    """Return what answers with vectors. Raises ValueError for a model that pools in a way that is not computed."""
    from configs.plans.pooling import pooling_of
    from configs.workloads.encode import EncodeWorkload
    from engine.inference.weights import finalize_weights, load_shard
    from engine.models.weights import DTYPES, required_manifest
    from engine.prompts.tokens import padded_batch
    from engine.workloads.encode import Encoder

    work = EncodeWorkload(pooling=pooling_of(required_manifest(context)) or "mean")
    shard = load_shard(context, DTYPES[settings.dtype])
    finalize_weights(context)
    encoder = Encoder(shard, context.communicators.pipeline, settings.max_sequences, work)

    def answer(tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        vectors = encoder.encode(padded_batch(tokens, context.device))[0].vectors
        assert vectors is not None
        if not bool(vectors.isfinite().all()):
            raise FloatingPointError("the model's vectors are not finite")
        return {"vectors": vectors.tolist()}

    return answer


def seq2seq_answers(settings: "ServingSettings", context: "Context") -> AnswerPrompts:
    """Return what answers with greedy tokens."""
    from engine.inference.pipeline import Replica
    from engine.inference.weights import finalize_weights, load_stacks
    from engine.models.weights import DTYPES
    from engine.prompts.tokens import padded_batch

    encoder, decoder = load_stacks(context, DTYPES[settings.dtype])
    finalize_weights(context)
    size = settings.max_sequences
    replica = Replica(decoder, context.communicators.pipeline, size, size, settings.max_length, encoder)

    def answer(tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        found = replica.decode(padded_batch(tokens, context.device), new_tokens)
        rows = [row for decoded in found for row in decoded.tokens.tolist()]
        if any(token < 0 for row in rows for token in row):
            raise FloatingPointError("the model's logits are not finite")
        return {"tokens": rows}

    return answer


def main(arguments: list[str]) -> int:
    """Compute until there are no more requests. Returns the exit code."""
    die_with_parent()
    from configs.common.files.reading import PLAN_BYTES, read_model
    from configs.families.config import ModelConfig
    from configs.plans.paths import JobPaths
    from configs.serving.settings import ServingSettings
    from engine.kernels.linear import why_no_cpu_kernels
    from engine.models.weights import required_manifest
    from engine.rank.binding import bind, devices_of_ranks
    from engine.rank.joining import make_context
    from engine.serving.rank import as_job

    said = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    settings = read_model(Path(arguments[0]), ServingSettings, PLAN_BYTES)
    place, job = place_from_environment(), as_job(settings)
    bind(place, settings.cores_per_rank, devices_of_ranks(place, job.target))
    context, _ = make_context(job, JobPaths(Path(settings.folder)), place)

    import torch

    with torch.inference_mode():
        config = ModelConfig.parse(required_manifest(context).config)
        vectors = encodes(config)
        answer = (encoder_answers if vectors else seq2seq_answers)(settings, context)
        answer([[0, 1, 2]], 2)  # the first call of a shape is slow
        about = {
            "kind": "encoder" if vectors else "encoder_decoder",
            "why_no_kernels": why_no_cpu_kernels() if context.device.type == "cpu" else None,
        }
        print(json.dumps({"ready": about}), file=said, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                told = answer(asked["tokens"], asked["new_tokens"])
            except (ValueError, FloatingPointError, RuntimeError) as error:
                told = {"error": str(error)[:500]}
            print(json.dumps({"id": asked["id"], **told}), file=said, flush=True)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
