"""The walk-through goes on where it stopped, keeps nothing that is wrong, and its quick command lines work."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.walkthrough.__main__ import ROOT, Walk
from benchmarks.walkthrough.page import page
from benchmarks.walkthrough.steps import Step, all_steps


def step(run: str, **changes: object) -> Step:
    return Step.model_validate({"part": "A part", "written": run, "run": run, "quick": True} | changes)


def test_an_interrupted_walk_goes_on_where_it_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = [step("echo one >> ran; cat ran"), step("echo two >> ran", group="g"), step("cat ran", group="g")]
    assert Walk(tmp_path).run(steps, -1.0) == 2
    assert "3 steps are left for the next call" in capfd.readouterr().out
    assert Walk(tmp_path).run(steps, None) == 0
    again = Walk(tmp_path)
    assert again.run(steps, None) == 0
    assert (tmp_path / "work" / "ran").read_text() == "one\ntwo\n"
    assert [again.results[each.id].text for each in steps] == ["one\n", "", "one\ntwo\n"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (step("exit 3"), "BAD 3"),
        (step("echo other", text="expected"), "BAD 0"),
        (step("false | true"), "BAD 1"),
    ],
)
def test_a_step_that_ends_otherwise_is_not_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: Step, said: str
) -> None:
    walk = Walk(tmp_path)
    assert walk.run([wrong], None) == 1 and walk.results == {}
    assert said in capfd.readouterr().out


def test_the_page_shows_commands_and_no_folder_of_this_machine(tmp_path: Path) -> None:
    steps = [
        step("pwd; echo $PYTHON_ENV; seq 40; exit 1", code=1, against="nothing", lines=6),
        step("true", against="word " * 30),
        step("echo '```'; printf '\\033[31mred\\033[0m'"),
    ]
    walk = Walk(tmp_path)
    assert walk.run(steps, None) == 0
    text = page([(each, walk.results[each.id]) for each in steps], datetime(2026, 1, 2, tzinfo=UTC))
    assert "on 2026-01-02" in text and text.count("## A part\n") == 1
    assert f"{'word ' * 21}word\nword" in text
    assert "Against nothing. Exit code 1." in text and "\n...\n38\n39\n40\n```\n" in text
    assert "````console" in text and "\nred\n" in text and "\x1b" not in text
    for path in (tmp_path, ROOT, sys.prefix):
        assert str(path) not in text


def test_steps_are_what_they_should_be() -> None:
    steps = all_steps()
    assert len({one.id for one in steps}) == len(steps)
    assert all(one.against or not one.needs or one.group for one in steps)
    assert not [one.written for one in steps if one.quick and one.needs]
    parts = list(dict.fromkeys(one.part for one in steps))
    assert len(parts) == 5 and [one.part for one in steps] == sorted((one.part for one in steps), key=parts.index)


@pytest.mark.nightly
def test_quick_command_lines_print_what_they_should(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quick = [one for one in all_steps() if one.quick]
    code = Walk(tmp_path).run(quick, None)
    assert code == 0, capfd.readouterr().out
    assert len(quick) >= 15
