"""Row `harness`: the Language Model Evaluation Harness, unmodified, on our server and by transformers.

A task of multiple choice over lines of Python's standard library: the harness sends prompts with `echo` and `logprobs`
to a server of the shipped tiny model with two ranks. Each score is computed again by transformers, of the same tokens.
"""

import inspect
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.reliability import TINY, tiny_server
from reports.text import Table, number

QUESTIONS, CHOICES, WITHIN = 60, 4, 1e-3
_TIMEOUT_SECONDS = 600
_TASK = """\
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def harness_row(program: Path | None, folder: Path) -> tuple[list[Table], bool]:
    """Scores of the harness over those of transformers. program: of the command lm_eval."""
    if program is None:
        print("needs --lm-eval, the path of the command lm_eval (pip install 'lm_eval[api]' transformers)")
        return [], False
    work = folder / "harness"
    work.mkdir(parents=True, exist_ok=True)
    data = work / "lines.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in _questions()))
    (work / "lines.yaml").write_text(_TASK.format(data=data))
    with tiny_server(folder / "logs", "--dtype", "float32") as server:
        given = {
            "model": server.model, "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "huggingface",
            "tokenizer": str(TINY), "num_concurrent": 8,
        }  # fmt: skip
        arguments = ",".join(f"{name}={value}" for name, value in given.items())
        command = [
            str(program), "--model", "local-completions", "--include_path", str(work), "--tasks", "lines",
            "--log_samples", "--output_path", str(work / "out"), "--model_args", arguments,
        ]  # fmt: skip
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment, check=False
        )
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        raise RuntimeError(f"{program}: ended with exit code {done.returncode}")
    samples = max((work / "out").rglob("samples_lines_*.jsonl"), key=lambda file: file.stat().st_mtime)
    return _compared([json.loads(line) for line in samples.read_text().splitlines()])


def _questions() -> list[dict[str, Any]]:
    """Return beginnings of lines, each with its own end and those of others."""
    rng = random.Random(0)
    source = inspect.getsource(json.decoder) + inspect.getsource(random)
    lines = [line.strip() for line in source.splitlines() if 30 < len(line.strip()) < 80]
    questions = []
    for line in rng.sample(lines, QUESTIONS):
        half = len(line) // 2
        # Of other lines the same part, so that lengths say little.
        ends = [line[half:], *(other[half:] or other for other in rng.sample(lines, CHOICES - 1))]
        order = rng.sample(range(CHOICES), CHOICES)
        choices = [ends[place] for place in order]
        questions.append({"text": line[:half], "choices": choices, "answer": order.index(0)})
    return questions


def _compared(samples: list[dict[str, Any]]) -> tuple[list[Table], bool]:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))
    errors, greedy, scores = [], 0, 0
    right = {"harness": 0, "transformers": 0}
    for sample in samples:
        found: dict[str, list[float]] = {"harness": [], "transformers": []}
        for choice, (told, was_greedy) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            score, is_greedy = _score(model, tokenizer, sample["doc"]["text"], choice)
            found["harness"].append(float(told))
            found["transformers"].append(score)
            errors.append(abs(float(told) - score))
            greedy += (str(was_greedy) == "True") == is_greedy
            scores += 1
        for name, values in found.items():
            right[name] += values.index(max(values)) == sample["doc"]["answer"]
    rows = (
        ("accuracy by the harness", number(right["harness"] / len(samples))),
        ("accuracy by transformers", number(right["transformers"] / len(samples))),
        ("scores", str(scores)),
        ("largest difference of a score", f"{max(errors):.2g}"),
        ("the same verdict on being the most likely answer", f"{greedy} of {scores}"),
    )
    met = scores == QUESTIONS * CHOICES and max(errors) <= WITHIN and greedy == scores
    return [Table(("figure", ""), rows)], met and right["harness"] == right["transformers"]


def _score(model: Any, tokenizer: Any, text: str, choice: str) -> tuple[float, bool]:
    """Return the log-probability of a choice after a text, and whether each of its tokens is the most likely one.

    Tokens as the harness takes them: blanks at the text's end belong to the choice, and the choice has those tokens of
    both together that come after as many as the text has.
    """
    import torch

    blanks = len(text) - len(text.rstrip())
    text, choice = text[: len(text) - blanks], text[len(text) - blanks :] + choice
    before, both = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (text, text + choice))
    tokens = before + both[len(before) :]
    with torch.inference_mode():
        found = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    places = range(len(before), len(tokens))
    total = sum(float(found[place - 1, tokens[place]]) for place in places)
    return total, all(int(found[place - 1].argmax()) == tokens[place] for place in places)
