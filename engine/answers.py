"""Answers of a rank, kept token by token so that a pure function can judge them later.

Likelihoods and logits come from one prompt at a time, without padding, so that they do not depend on
how prompts were put into batches. Called by `engine.generate.measure` after everything timed.

Columns (P prompts, prompt index counted over all ranks):
  answer_prompts [P] int32           index of each of this rank's prompts
  answer_tokens [P x new] int32      greedy tokens
  answer_nll [N] float32             negative log-likelihood of every prompt token after the first, nats
  answer_nll_prompts [N] int32       the prompt that each belongs to
  answer_logits [R x V] float32      logits at the last LOGIT_POSITIONS positions of each prompt
  answer_logit_prompts [R] int32     the prompt that each row of logits belongs to
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from configs.base import write_atomically
from configs.record import Figure
from engine.context import Context, Samples
from engine.tokens import Prompts, load_tokenizer, tokenizer_path

LOGIT_POSITIONS = 4
MAX_LOGIT_BYTES = 64 * 1024 * 1024


def collect_answers(
    prompts: Prompts,
    tokens: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> tuple[dict[str, Figure], Samples]:
    """Figures and columns. tokens [P, new]: greedy; logits_of: ids [length] -> float32 logits [length, vocabulary].

    Logits are kept of the first prompts only, as far as MAX_LOGIT_BYTES reach; the figure
    `answer_logits_kept_prompts` says how many those are.
    """
    likelihoods: list[np.ndarray] = []
    logits: list[np.ndarray] = []
    kept_bytes, room, vocabulary = 0, True, 0
    for ids in prompts.tokens:
        scores = logits_of(torch.tensor(ids, device=device))
        vocabulary = scores.shape[1]
        targets = torch.tensor(ids[1:], device=device, dtype=torch.int64)
        likelihoods.append(functional.cross_entropy(scores[:-1], targets, reduction="none").cpu().numpy())
        rows = scores[-LOGIT_POSITIONS:].cpu().numpy()
        kept_bytes += rows.nbytes
        room = room and kept_bytes <= MAX_LOGIT_BYTES
        if room:
            logits.append(rows.copy())
    indices = np.arange(prompts.first, prompts.first + len(prompts.tokens), dtype=np.int32)
    samples = {
        "answer_prompts": indices,
        "answer_tokens": tokens.to(torch.int32).flatten().numpy(),
        "answer_nll": np.concatenate(likelihoods).astype(np.float32),
        "answer_nll_prompts": np.repeat(indices, [len(part) for part in likelihoods]),
        "answer_logits": np.concatenate([rows.ravel() for rows in logits] or [np.empty(0)]).astype(np.float32),
        "answer_logit_prompts": np.repeat(indices[: len(logits)], [len(rows) for rows in logits]),
    }
    return {"answer_vocabulary": vocabulary, "answer_logits_kept_prompts": len(logits)}, samples


def write_completions(path: Path, prompts: Prompts, tokens: torch.Tensor, context: Context) -> None:
    """One JSON object a prompt for people to read: prompt_index, prompt, completion, tokens.

    Nothing is written where the model brings no tokenizer.
    """
    source = tokenizer_path(context)
    if source is None:
        return
    tokenizer = load_tokenizer(source)
    lines = []
    for place, (ids, answer) in enumerate(zip(prompts.tokens, tokens.tolist(), strict=True)):
        lines.append(
            json.dumps(
                {
                    "prompt_index": prompts.first + place,
                    "prompt": tokenizer.decode(ids),
                    "completion": tokenizer.decode(answer),
                    "tokens": answer,
                },
                ensure_ascii=False,
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines) + "\n")
