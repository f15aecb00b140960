"""What records teach: a machine slower by a factor is found, likeness decides, torn files do not count."""

import math
from pathlib import Path

import pytest

from benchmarks.planner.cells import made_up_calibration
from configs.common.base import content_hash
from configs.hardware.architectures import ARCHITECTURES
from configs.spec.cell import Cell
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture
from engine.planner.learning import (
    Experience,
    Known,
    config_hash,
    experience_path,
    learner_from,
    merged,
    read_experiences,
    remember,
)
from engine.planner.local import hardware_fingerprint, this_fingerprint

CONFIG = ARCHITECTURES["llama-110m"]
LARGE = read_architecture(CONFIG, "llama-110m")
HERE = made_up_calibration().to_machine(1)


def cell_of(batch: int, dtype: str = "bfloat16") -> Cell:
    work = GenerateWorkload(batch_size=batch, prompt_tokens=32, num_prompts=batch)
    return Cell.model_validate({"model": "m", "workload": work.model_dump(), "dtype": dtype})


def measured(cell: Cell, times: float, at: str = "2026-01-01", device: str = "cpu") -> Experience:
    """A cell that took so many times as long as predicted."""
    said = predict_cell(cell, LARGE, HERE).tokens_per_second
    assert said is not None
    return Experience(
        key=cell.key,
        cell=cell,
        config=config_hash(CONFIG),
        tokens_per_second=said / times,
        device=device,
        measured_at=at,
    )


def known(*experiences: Experience) -> Known:
    return Known(experiences=experiences, configs={config_hash(CONFIG): CONFIG})


def test_a_machine_that_is_slower_by_a_third_is_found_and_said() -> None:
    learner = learner_from(known(*(measured(cell_of(batch), 1.3) for batch in range(1, 31))), lambda _: HERE)
    assert learner is not None
    said = predict_cell(cell_of(48), LARGE, HERE, learner)
    before = predict_cell(cell_of(48), LARGE, HERE)
    assert said.correction == pytest.approx(1.3, rel=0.03) and said.learnt_from == 30
    assert said.tokens_per_second and before.tokens_per_second and said.factor and before.factor
    assert said.tokens_per_second == pytest.approx(before.tokens_per_second / (said.correction or 0))
    assert said.factor < before.factor


def test_one_record_moves_the_prediction_only_part_of_the_way() -> None:
    learner = learner_from(known(measured(cell_of(64, "float32"), 2.0)), lambda _: HERE)
    assert learner is not None
    far = learner(cell_of(1), LARGE)
    assert far is not None and 1.0 < far.times < 1.5 and far.records == 1 and far.factor > 1.2
    near = learner(cell_of(64, "float32"), LARGE)
    assert near is not None and far.times < near.times <= 2.0


def test_likeness_decides_between_formats_that_err_differently() -> None:
    rows = [measured(cell_of(batch), 1.5) for batch in range(1, 9)]
    rows += [measured(cell_of(batch, "float32"), 1.0) for batch in range(1, 9)]
    learner = learner_from(known(*rows), lambda _: HERE)
    assert learner is not None
    half, single = learner(cell_of(10), LARGE), learner(cell_of(10, "float32"), LARGE)
    assert half is not None and single is not None
    assert half.times == pytest.approx(1.5, rel=0.08) and single.times == pytest.approx(1.0, rel=0.08)


def test_generation_teaches_nothing_of_training_and_a_gpu_nothing_of_cores() -> None:
    learner = learner_from(known(measured(cell_of(1), 1.3)), lambda _: HERE)
    assert learner is not None and learner(Cell(model="m", workload=TrainWorkload()), LARGE) is None
    assert learner_from(known(measured(cell_of(1), 1.3, device="NVIDIA T4")), lambda _: HERE) is None
    assert learner_from(Known(), lambda _: HERE) is None


def test_only_the_newest_records_count_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planner.learning.MOST_RECORDS", 40)
    rows = [measured(cell_of(batch), 3.0, at=f"2026-01-01T{batch:06d}") for batch in range(1, 21)]
    rows += [measured(cell_of(batch + 20), 1.2, at=f"2026-02-01T{batch:06d}") for batch in range(40)]
    learner = learner_from(known(*rows), lambda _: HERE)
    assert learner is not None
    found = learner(cell_of(30), LARGE)
    assert found is not None and found.records == 40 and found.times == pytest.approx(1.2, rel=0.02)


def test_what_is_remembered_is_read_back_once_and_the_newest_of_a_cell(tmp_path: Path) -> None:
    path = experience_path(tmp_path, this_fingerprint())
    first = known(measured(cell_of(1), 1.1, "2026-01-01"), measured(cell_of(2), 1.1, "2026-01-01"))
    assert remember(first, path) == 2 and remember(first, path) == 0
    again = measured(cell_of(1), 1.4, "2026-02-01")
    assert remember(known(again), path) == 1
    found = read_experiences(path)
    assert found.configs == {config_hash(CONFIG): CONFIG}
    assert {experience.key: experience for experience in found.experiences}[again.key] == again
    assert len(found.experiences) == 2
    assert path.read_text().count('"json"') == 1


def test_speeds_of_kernels_before_tiles_teach_nothing(tmp_path: Path) -> None:
    """On processors with AMX they were half of today's in bfloat16, and predictions were corrected to that."""
    fingerprint = this_fingerprint()
    before = content_hash(fingerprint.model_dump(mode="json") | {"engine": 2})
    assert experience_path(tmp_path, fingerprint).name != f"{before}.jsonl"


def test_a_line_cut_short_by_a_crash_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    remember(known(measured(cell_of(1), 1.1), measured(cell_of(2), 1.1)), path)
    path.write_text(path.read_text()[:-40] + "\nnonsense\n[1]\n")
    assert len(read_experiences(path).experiences) == 1
    assert read_experiences(tmp_path / "none.jsonl") == Known()


def test_what_comes_after_a_line_cut_short_is_kept(tmp_path: Path) -> None:
    """It was written behind the rest of that line: the model's configuration, and with it all of its cells."""
    path = experience_path(tmp_path, this_fingerprint())
    remember(known(measured(cell_of(1), 1.1)), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:40])  # of the first line, which holds the configuration
    assert remember(known(measured(cell_of(1), 1.1), measured(cell_of(2), 1.1)), path) == 2
    found = read_experiences(path)
    assert len(found.experiences) == 2 and found.configs == {config_hash(CONFIG): CONFIG}
    assert learner_from(found, lambda _: HERE) is not None


def test_years_of_runs_leave_a_file_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each night of a regression check appended its cells: every plan read all, until the file was too large to read
    and nothing was corrected any more."""
    monkeypatch.setattr("engine.planner.learning.MOST_RECORDS", 3)
    monkeypatch.setattr("engine.planner.learning._MAX_FILE_BYTES", 8_000)
    path, sizes = experience_path(tmp_path, this_fingerprint()), []
    for day in range(40):
        cells = [measured(cell_of(batch), 1.1, f"2026-01-01T{day:06d}") for batch in (1, 2)]
        assert remember(known(*cells), path) == 2
        sizes.append(path.stat().st_size)
    assert max(sizes) < 16_000 and max(sizes[20:]) == max(sizes[:20])
    found = read_experiences(path)
    assert {each.measured_at for each in found.experiences} == {"2026-01-01T000039"} and len(found.experiences) == 2
    assert found.configs == {config_hash(CONFIG): CONFIG} and learner_from(found, lambda _: HERE) is not None
    path.write_text("x" * 9_000)  # of another format
    assert remember(known(measured(cell_of(1), 1.1)), path) == 1 and path.read_text().startswith("xxx")


def test_sources_are_joined_by_date() -> None:
    old, new = measured(cell_of(1), 1.1, "2026-01-01"), measured(cell_of(1), 1.2, "2026-03-01")
    for order in ((old, new), (new, old)):
        assert merged(known(each) for each in order).experiences == (new,)


def test_a_model_that_the_planner_no_longer_reads_is_passed_over() -> None:
    strange = Known(experiences=(measured(cell_of(1), 1.3),), configs={config_hash(CONFIG): {"model_type": "x"}})
    assert learner_from(strange, lambda _: HERE) is None


def test_hardware_is_told_apart_by_what_records_keep() -> None:
    environment: dict[str, object] = {"cpu_model": "A", "cores": 2, "torch": "2.13", "hostname": "x"}
    assert hardware_fingerprint(environment) == hardware_fingerprint(environment | {"hostname": "y"})
    assert hardware_fingerprint(environment) != hardware_fingerprint(environment | {"cores": 4})
    assert hardware_fingerprint({"cores": 2}) is None


def test_leaving_each_record_out_the_interval_holds() -> None:
    """Errors that grow with the batch: what was left out lies within the interval as often as it says."""
    rows = [measured(cell_of(batch), 1.1 + 0.05 * math.log2(batch)) for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    inside = 0
    for out in rows:
        learner = learner_from(known(*(row for row in rows if row is not out)), lambda _: HERE)
        assert learner is not None
        said = predict_cell(out.cell, LARGE, HERE, learner)
        assert said.tokens_per_second and said.factor
        inside += 1 / said.factor <= out.tokens_per_second / said.tokens_per_second <= said.factor
    assert inside >= 9
