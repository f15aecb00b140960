"""Where figures come from: what was loaded, apart by what fixes its time."""

import json
from pathlib import Path

from configs.common.execution import Layout
from configs.targets.target import LocalTarget
from reports.provenance import environment_differences, environment_table, loading_table, models_sentence
from reports.reading.load import load_run
from reports.render import render_report
from tests.support.run_folders.priced_runs import cell, make_plan, write_measurements, write_run


def test_loads_of_other_machines_weights_and_caches_are_rows_of_their_own(tmp_path: Path) -> None:
    """90 launches of eight compressions had one median, and two of a cold and a warm cache, or of two machines, too."""
    one = cell(target="a")
    cells = {
        "a": one,
        "b": cell(target="b"),
        "int4": one.model_copy(update={"compression": ("int4",)}),
        "cold": one.model_copy(update={"page_cache": "cold"}),
    }
    targets = [LocalTarget(name="a"), LocalTarget(name="b")]
    run = write_run(tmp_path / "run", make_plan(list(cells.values()), repeats=2, targets=targets))
    for seconds, item in enumerate(cells.values(), start=1):
        write_measurements(run, item, [100.0, 100.0], figures={"load_seconds": float(seconds)})
    table = loading_table(load_run(run))
    assert table is not None
    assert table.columns == (
        "model",
        "target",
        "layout",
        "dtype",
        "engine",
        "compression",
        "page cache",
        "launches",
        "slowest rank, s, median (interval)",
    )
    assert {row[1:2] + row[5:] for row in table.rows} == {
        ("a", "–", "–", "2", "1.00 [1.00 to 1.00]"),
        ("b", "–", "–", "2", "2.00 [2.00 to 2.00]"),
        ("a", "int4", "–", "2", "3.00 [3.00 to 3.00]"),
        ("a", "–", "cold", "2", "4.00 [4.00 to 4.00]"),
    }


def test_what_is_the_same_of_all_loads_has_no_column(tmp_path: Path) -> None:
    one, two = cell(), cell(dp=2)
    run = write_run(tmp_path / "run", make_plan([one, two], repeats=2))
    for item in (one, two):
        write_measurements(run, item, [100.0, 100.0], figures={"load_seconds": 1.0})
    table = loading_table(load_run(run))
    assert table is not None and len(table.rows) == 2
    assert table.columns[:5] == ("model", "layout", "dtype", "engine", "launches")


def test_several_hashes_of_one_model_are_explained(tmp_path: Path) -> None:
    """A study with tp=2 listed two hashes of the weights of one model, and no word said why."""
    one = cell()
    two = one.model_copy(update={"layout": Layout(tp=2)})
    for name, hashes in (("same", ("a1", "a1")), ("split", ("a1", "b2"))):
        run = write_run(tmp_path / name, make_plan([one, two], repeats=1))
        for item, digest in zip((one, two), hashes, strict=True):
            write_measurements(run, item, [100.0], figures={"weights_hash": digest})
        told = models_sentence(load_run(run))
        assert ("split by tp or pp" in told) is (name == "split")
        render_report(run)
        assert ("split by tp or pp" in run.appendix.read_text()) is (name == "split")


def test_environments_show_no_values_of_python(tmp_path: Path) -> None:
    """The table of the environment had rows such as `| tf32 | None |`."""
    one, two = cell(), cell(dp=2)
    run = write_run(tmp_path / "run", make_plan([one, two], repeats=1))
    for item, dirty in ((one, True), (two, None)):
        facts = {"tf32": None, "deterministic": False, "libraries": {"torch": "2.9"}, "dirty": dirty}
        path = run.environment(digest := f"{item.layout.dp}" * 16)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts))
        write_measurements(run, item, [100.0], environment=digest)
    study = load_run(run)
    shared, apart = environment_table(study), environment_differences(study)
    assert shared is not None and apart is not None
    assert shared.rows == (("`deterministic`", "false"), ("`libraries.torch`", "2.9"), ("`tf32`", "none"))
    assert apart.rows == (("`dirty`", "true", "none"),)
