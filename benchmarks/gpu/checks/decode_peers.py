"""Decode of the 8B shape by unmodified transformers, with a static cache and compiled, beside ours in one process.

A peer decodes as in a study (`engine.peers`): `generate`, with a timestamp at every token. Compiled: transformers' own
settings for a GPU. Ours is timed with the same synchronisation at every token, so that ratios compare equals.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.shapes import large_model, one_shard
from engine.inference.pipeline import Replica
from engine.parallel.communicator import Communicator
from engine.peers.compiled import static_cache
from engine.peers.decoding import generate_decoder
from engine.prompts.decoded import Decode
from engine.prompts.tokens import PromptBatch

_WARM_UP_TOKENS = 4


def run(bench: Bench) -> None:
    """Report milliseconds a token of each engine, and ours over each."""
    config = large_model(bench)
    prompt, new_tokens = (16, 12) if bench.rehearsal else (512, 64)
    batches = (1, 2) if bench.rehearsal else (1, 8, 64)
    own: dict[int, float] = {}
    shard = one_shard(bench, config, torch.bfloat16)
    for batch in batches:
        replica = Replica(shard, Communicator((0,), 0), batch, batch, prompt + new_tokens)
        decode = partial(replica.decode, new_tokens=new_tokens)
        own[batch] = _report(bench, f"ours, batch {batch}", decode, _prompts(bench, config, batch, prompt))
        del replica
    del shard, decode
    free_memory(bench.device)
    model = _model(bench, config)
    for mode in ("static", "compiled"):
        for batch in batches:
            part = partial(_peer, bench, model, mode, batch, prompt, new_tokens, own[batch])
            bench.attempt(f"transformers {mode}, batch {batch}", part, seconds=2.0 if bench.rehearsal else 10.0)


def _peer(bench: Bench, model: Any, mode: str, batch: int, prompt: int, new_tokens: int, own: float) -> None:
    caches: dict[int, Any] = {}

    def settings(model: Any, rows: int, capacity: int) -> dict[str, Any]:
        if rows not in caches:
            caches[rows] = static_cache(model, rows, capacity)
        cache = caches[rows]
        cache.reset()
        if mode == "static":
            return {"past_key_values": cache, "disable_compile": True}
        return {"past_key_values": cache, "compile_config": _compile_config(bench)}

    decode = generate_decoder(model, new_tokens, prompt + new_tokens, bench.device, settings)
    name = f"transformers {mode}, batch {batch}"
    taken = _report(bench, name, decode, _prompts(bench, model.config.to_dict(), batch, prompt))
    bench.figure(f"tokens of ours for one of {name}", [taken / own])


@torch.inference_mode()
def _report(bench: Bench, name: str, decode: Decode, prompts: PromptBatch) -> float:
    """Report the milliseconds of each token after the first few; return their median."""
    decode(prompts)  # records, compiles
    gaps: list[float] = []
    for _ in range(2):
        for decoded in decode(prompts):
            gaps += np.diff(decoded.stamps)[_WARM_UP_TOKENS:].tolist()
    return bench.figure(f"{name}: a token", [gap * 1e3 for gap in gaps], "ms")


def _prompts(bench: Bench, config: dict[str, Any], batch: int, length: int) -> PromptBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config["vocab_size"], (batch, length), generator=generator)
    return PromptBatch(tokens.to(bench.device), None)


def _model(bench: Bench, config: dict[str, Any]) -> Any:
    """Return transformers' model with random weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    named = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    parsed = AutoConfig.for_model(config["model_type"], **named)
    with torch.device(bench.device), no_init_weights():
        model = AutoModelForCausalLM.from_config(parsed, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model.requires_grad_(False)


def _compile_config(bench: Bench) -> Any:
    from transformers import CompileConfig

    if not bench.rehearsal:
        return CompileConfig(fullgraph=True, dynamic=False)
    config = CompileConfig(fullgraph=True, dynamic=False, mode=None, backend="eager")
    config._compile_all_devices = True
    return config
