"""What of a report and a cell table goes into Prefect's UI."""

import base64
from pathlib import Path

from configs.plans.paths import RunPaths
from tasks.publish import artifact_key, cell_rows, report_for_ui

PNG = b"\x89PNG" + bytes(300)


def a_report(folder: Path, text: str) -> RunPaths:
    run = RunPaths(folder)
    run.plots.mkdir()
    (run.plots / "a.png").write_bytes(PNG)
    (run.plots / "b.png").write_bytes(PNG)
    run.report.write_text(text)
    return run


def test_figures_are_inside(tmp_path: Path) -> None:
    run = a_report(
        tmp_path,
        "![sweep \\[x\\]](plots/a.png)\n\nIt grows. ([SVG](plots/a.svg))\n\nIt does. ([evidence](appendix.md#x))\n",
    )
    inside = base64.b64encode(PNG).decode()
    assert report_for_ui(run) == f"![sweep \\[x\\]](data:image/png;base64,{inside})\n\nIt grows.\n\nIt does.\n"


def test_figures_that_do_not_fit_are_named(tmp_path: Path) -> None:
    run = a_report(tmp_path, "![a](plots/a.png)\n![b](plots/b.png)\n![c](plots/none.png)\n")
    first, second, third = report_for_ui(run, max_bytes=700).splitlines()
    assert first.startswith("![a](data:image/png;base64,")
    assert second == f"*figure: `{tmp_path}/plots/b.png`*"
    assert third == f"*figure: `{tmp_path}/plots/none.png`*"


def test_files_of_the_machine_do_not_leave_it_as_figures_of_a_foreign_report(tmp_path: Path) -> None:
    """They went to the API, whatever `report.md` named: `![strong](../.aws/credentials)`."""
    (tmp_path / "credentials.png").write_bytes(b"hush")
    (tmp_path / "run").mkdir()
    run = a_report(tmp_path / "run", "")
    (run.plots / "linked.png").symlink_to(tmp_path / "credentials.png")
    (run.folder / "notes.txt").write_text("hush")
    named = ["../credentials.png", f"{tmp_path}/credentials.png", "plots/linked.png", "notes.txt", "plots/a.png"]
    run.report.write_text("".join(f"![x]({name})\n" for name in named))
    *refused, figure = report_for_ui(run).splitlines()
    assert refused == [f"*figure: `{run.folder / name}`*" for name in named[:-1]]
    assert figure.startswith("![x](data:image/png;base64,")


def test_links_to_files_become_paths(tmp_path: Path) -> None:
    text = "[records](records/1a/), [Prefect](https://prefect.io), \\[not\\](a link)\n"
    run = a_report(tmp_path, text)
    assert report_for_ui(run) == "records (`records/1a/`), [Prefect](https://prefect.io), \\[not\\](a link)\n"


def a_cell(**known: str) -> dict[str, str]:
    columns = ["tokens_per_second_median", "time_per_output_token_seconds_median", "step_seconds_median"]
    columns += ["embeddings_per_second_median", "items_per_second_median", "peak_memory_bytes_all_ranks"]
    told = {"model": "m", "name": "dp=2", "status": "completed", "experiments": "strong; batch"}
    return dict.fromkeys(columns, "") | told | {"repeats_completed": "3", "repeats_planned": "3"} | known


def test_the_cell_table_has_what_any_cell_knows() -> None:
    measured = a_cell(tokens_per_second_median="149.857", time_per_output_token_seconds_median="0.0374966")
    failed = a_cell(status="out_of_memory", repeats_completed="0")
    assert cell_rows([measured, failed]) == [
        {
            "cell": "dp=2",
            "state": "completed",
            "tokens/s": "150",
            "ms per token": "37.5",
            "repeats": "3 of 3",
            "experiments": "strong; batch",
        },
        {
            "cell": "dp=2",
            "state": "out_of_memory",
            "tokens/s": "–",
            "ms per token": "–",
            "repeats": "0 of 3",
            "experiments": "strong; batch",
        },
    ]


def test_the_cell_table_tells_models_apart() -> None:
    rows = cell_rows([a_cell(model="small"), a_cell(model="large")])
    assert [row["model"] for row in rows] == ["small", "large"]


def test_artifact_keys_are_what_prefect_allows() -> None:
    assert artifact_key("My_Study.2") == "my-study-2"
    assert artifact_key("...") == "study"
