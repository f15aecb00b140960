"""Published rows of training memory: read, predicted without their measured columns, or refused with a reason."""

import pytest

from engine.planner.check.memory import Degrees, degrees, predict, setup_of
from engine.planner.check.rows import checked

# Of torchtitan, December 2024: the rows that the project has (benchmarks/llama3_h100_202412_torchtitan.md).
ROWS = [
    {
        "model": model, "num_gpus": gpus, "gpu": "h100_96gb", "parallelism": parallelism, "local_batch_size": batch,
        "sequence_length": "8192", "activation_checkpointing": checkpointing, "compile": compiled, "float8": float8,
        "peak_memory_gib": peak, "tokens_per_second_per_gpu": rate,
    }
    for model, gpus, parallelism, batch, checkpointing, compiled, float8, peak, rate in (
        ("llama-3.1-8b", "8", "fsdp", "2", "selective", "false", "false", "82.4", "5762"),
        ("llama-3.1-8b", "8", "fsdp", "2", "selective", "true", "false", "77.0", "6667"),
        ("llama-3.1-70b", "256", "fsdp32_tp8", "16", "full", "true", "true", "71.9", "829"),
    )
]  # fmt: skip


def test_every_row_is_within_15_percent() -> None:
    result = checked(ROWS, predict(ROWS, []), "peak_memory_gib")
    assert len(result.errors) == len(ROWS)
    assert max(result.errors) <= 0.15


def test_measured_columns_are_not_read() -> None:
    scrambled = [{**row, "peak_memory_gib": "1", "tokens_per_second_per_gpu": "nothing"} for row in ROWS]
    blind = [{name: value for name, value in row.items() if not name.startswith(("peak", "tokens"))} for row in ROWS]
    expected = predict(ROWS, [])
    assert predict(scrambled, ROWS) == predict(blind, scrambled) == expected


@pytest.mark.parametrize(
    ("text", "ranks", "found"),
    [
        ("fsdp", 64, Degrees(64, 1, 1, 1, 1, False)),
        ("fsdp32_tp8", 256, Degrees(32, 1, 8, 1, 1, False)),
        ("fsdp8_tp8_pp8", 512, Degrees(8, 1, 8, 1, 8, False)),
        ("FSDP8, TP8, CP8", 512, Degrees(8, 1, 8, 8, 1, False)),
        ("fsdp_tp8_asynctp", 64, Degrees(8, 1, 8, 1, 1, False)),
        ("hsdp4x8", 32, Degrees(8, 4, 1, 1, 1, False)),
        ("ddp", 8, Degrees(8, 1, 1, 1, 1, True)),
        ("tp", 8, Degrees(1, 1, 8, 1, 1, False)),
        ("none", 1, Degrees(1, 1, 1, 1, 1, False)),
    ],
)
def test_parallelism_is_read(text: str, ranks: int, found: Degrees) -> None:
    assert degrees(text, ranks) == found


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("parallelism", "fsdp_ep8", "'ep8' is not one of fsdp"),
        ("parallelism", "fsdp3", "does not make 8 ranks"),
        ("parallelism", "none", "does not make 8 ranks"),
        ("parallelism", "hsdp", "hsdp needs copies x shards"),
        ("model", "llama-9-1b", "llama-9-1b"),
        ("local_batch_size", "", "local_batch_size: missing or empty"),
        ("activation_checkpointing", "some", "'some' is not one of none, selective, full"),
        ("compile", "maybe", "compile 'maybe' is not true or false"),
    ],
)
def test_what_cannot_be_predicted_says_why(column: str, value: str, reason: str) -> None:
    (prediction,) = predict([{**ROWS[0], column: value}], [])
    assert prediction.predicted is None
    assert reason in (prediction.reason or "")


def test_a_pipeline_splits_its_batch_and_keeps_weights_gathered() -> None:
    row = {
        **ROWS[2],
        "model": "llama-3.1-405b",
        "num_gpus": "512",
        "parallelism": "fsdp8_tp8_pp8",
        "local_batch_size": "32",
    }
    setup, framework = setup_of(row)
    assert (setup.micro_batch, setup.accumulation, setup.layout.pp) == (4, 8, 8)
    assert framework.stays_gathered == "all"
    (prediction,) = predict([row], [])
    assert prediction.predicted is not None
    assert 20 < prediction.predicted < 200


def test_one_rank_without_parallelism() -> None:
    row = {**ROWS[0], "model": "gpt2", "parallelism": "none", "num_gpus": "1", "sequence_length": "1024"}
    setup, _ = setup_of(row)
    assert (setup.layout.ranks, setup.layout.strategy, setup.precision) == (1, "none", "bfloat16_autocast")
    (prediction,) = predict([row], [])
    assert prediction.predicted is not None and 1 < prediction.predicted < 40


def test_context_parallelism_shares_out_sequence_and_weights() -> None:
    plain, _ = setup_of(ROWS[0])
    split, _ = setup_of({**ROWS[0], "parallelism": "fsdp2_cp4"})
    assert split.sequence_length == plain.sequence_length // 4
    assert split.layout.dp == plain.layout.dp
