"""Targets: study files, `--set`, forms, price files, catalog files, tables for `rankwise fit`."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from configs.common.files.reading import parse_json
from configs.hardware.catalog_file import read_catalog_file
from configs.hardware.price_file import read_price_file
from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.plans.points.layouts import LayoutChoice
from configs.spec.form import study_of_form
from configs.spec.study import StudySpec, load_study, study_yaml
from reports.laws.file import read_points

_FOLDER = Path(tempfile.mkdtemp(prefix="rankwise-fuzz-study-"))
_STUDY = """study: small
models: [{id: synthetic:llama-1m@0, name: m}, {id: owner/name, revision: main, name: n}]
workload: {kind: generate, prompt_tokens: 8, new_tokens: 4, num_prompts: 4, batch_size: 2}
layout: {dp: 1, tp: 1, pp: 1, stage_balance: speed}
dtype: float32
measuring: {repeats: 2, warmup: 1, min_seconds: 0.5, target_interval: 0.1, live: [tensorboard]}
targets: [{kind: local, cores_per_rank: 1, env: {OMP_NUM_THREADS: "1"}}]
objectives: {tokens_per_second: 10}
forecast: {to: 64}
experiments:
  tp: {kind: strong, grow: tp, to: 2, base: &base {dtype: bfloat16}}
  dp: {kind: weak, grow: dp, points: [1, 2], base: {<<: *base}}
  batch: {kind: sweep, over: {batch_size: [1, 2], layout.tp: [1, 2], compression: [none, int8]}}
  half: {kind: optimization, baseline: {batch_size: 1}, variants: {half: {dtype: bfloat16}}}
  right: {kind: correctness, layouts: [{tp: 2}], engines: [rankwise, transformers], dtypes: [bfloat16]}
  small: {kind: compression, passes: [int8, prune_2_4+int8], dtypes: [float32]}
  links: {kind: communication, ranks: [2, 4], sizes_bytes: [1024], transports: [auto]}
"""
_TRAINING = """study: train
models: [{id: synthetic:gpt2-1m@0}]
workload: {kind: train, global_batch_size: 8, sequence_length: 32, steps: 4, micro_batch_size: 2}
targets:
  - {kind: slurm, name: gpus, nodes: 2, ranks_per_node: 4, partition: p, time_limit_minutes: 30, extra: {licenses: a}}
  - {kind: slurm, name: cpus, nodes: 4, container: {image: a.sif}, link: {latency_seconds: 1e-6, bytes_per_second: 1e9}}
experiments:
  nodes: {kind: weak, grow: nodes, to: 2, base: {layout: {dp: 2, strategy: fsdp}}}
  strategies: {kind: sweep, over: {layout.strategy: [ddp, fsdp, zero3], global_batch_size: [8, 16]}}
layouts: auto
"""
_PRICES = """as_of: 2026-11-01
prices: [{target: "gpu-*", usd_per_hour: 2.1, source: contract}, {machine: "aws/*", region: us-east-1, usd_per_hour: 1}]
"""
_CATALOG = """as_of: 2026-11-01
source: measured
accelerators: {h100-80gb: {memory_bytes: 84.9e9}}
links: {our-fabric: {latency_seconds: 8e-6}}
instances:
  lab/rack-7: {accelerator: h100-80gb, accelerators: 4, vcpus: 64, host_memory_bytes: 1e12, network: our-fabric}
prices: [{machine: "lab/*", usd_per_hour: 9.5}]
"""
_CHOICE = LayoutChoice(ranks=lambda target: 4, ranked=lambda cell, ranks: [])


def targets() -> dict[str, Callable[[bytes], object]]:
    """Readers of what a user writes."""
    return {
        "study.file": _read_file,
        "study.set": _read_assignments,
        "study.form": lambda data: _expanded(study_of_form(parse_json(data, "form"))),
        "study.prices": lambda data: read_price_file(_written(data, "prices.yaml"), "prices.yaml"),
        "study.points": lambda data: read_points(_written(data, "points.csv")),
        "study.catalog": lambda data: read_catalog_file(_written(data, "hardware.yaml")),
    }


def seeds() -> dict[str, tuple[bytes, ...]]:
    """Studies of every kind of experiment."""
    form = json.dumps(
        {
            "study": "form",
            "workload": {"kind": "encode", "prompt_tokens": 8, "batch_size": 2},
            "experiments": [{"name": "batch", "question": {"kind": "sweep", "over": {"batch_size": [1, 2]}}}],
            "target": {"kind": "local"},
        }
    )
    sets = ("measuring.repeats=3", "models.0.id=synthetic:llama-1m@1", "experiments.batch.over={batch_size: [1, 4]}")
    return {
        "study.file": (_STUDY.encode(), _TRAINING.encode()),
        "study.set": (*(text.encode() for text in sets), "\n".join(sets).encode()),
        "study.form": (form.encode(),),
        "study.prices": (_PRICES.encode(),),
        "study.catalog": (_CATALOG.encode(),),
        "study.points": (b"ranks,throughput,repeat,gpu\n1,10,0,a\n2,19,0,a\n4,35,0,b\n", b"ranks,throughput\n1,10\n"),
    }


def _written(data: bytes, name: str) -> Path:
    path = _FOLDER / name
    path.write_bytes(data)
    return path


def _read_file(data: bytes) -> None:
    """Load a study, expand it, and load what `study_yaml` writes of it: the same study."""
    study = load_study(_written(data, "study.yaml"))
    _expanded(study)
    again = study_yaml(study)
    assert load_study(_written(again.encode(), "again.yaml")) == study, "study_yaml changes a study"


def _read_assignments(data: bytes) -> None:
    _expanded(load_study(_written(_STUDY.encode(), "base.yaml"), data.decode("utf-8", "surrogateescape").split("\n")))


def _expanded(study: StudySpec) -> Plan:
    models = [PlannedModel(name=model.name, identity=model.id, manifest="") for model in study.models]
    return expand(study, models, {}, lambda workload: 5, _CHOICE)
