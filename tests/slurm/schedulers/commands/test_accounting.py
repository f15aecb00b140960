"""The text of sacct, read; rows as Slurm 22.05 wrote them, with SLURM_TIME_FORMAT=%s where times are numbers."""

import pytest

from slurm.schedulers.commands.accounting import (
    SACCT_ARGUMENTS,
    SACCT_FORMAT,
    duration_seconds,
    read_accounts,
    sacct_command,
)

TEXT = f"""{SACCT_FORMAT.replace(",", "|")}
295_0|COMPLETED|lab[1-2]|1700000000|1700000004|1700000016|12|00:08.131||0|None
295_0.batch|COMPLETED|lab1|1700000004|1700000004|1700000016|12|00:00.131|9000K|0|
295_0.0|COMPLETED|lab[1-2]|1700000004|1700000004|1700000016|12|00:08.000|537832K|0|
295_1|CANCELLED by 0|None assigned|1700000000|None|1700000016|0|00:00:00||0|None
296|NODE_FAIL|gpu07|2026-01-31T12:00:00|2026-01-31T12:00:30|2026-01-31T12:01:00|30|1-02:03:04|1.5G|2500|None
296.0|CANCELLED|gpu07|||||12:13.5|2G|2400|
297.0|RUNNING|gpu07||||||||
"""


def test_a_task_of_an_array() -> None:
    accounting = read_accounts(TEXT)["295_0"].accounting
    assert accounting.model_dump() == {
        "job_id": "295_0",
        "state": "COMPLETED",
        "nodes": ("lab1", "lab2"),
        "queued_seconds": 4,
        "elapsed_seconds": 12,
        "cpu_seconds": 8.131,
        "max_rss_bytes": 537832 * 1024,
        "energy_joules": None,
    }


def test_a_job_that_never_started_has_no_times_and_no_nodes() -> None:
    accounting = read_accounts(TEXT)["295_1"].accounting
    assert (accounting.state, accounting.nodes) == ("CANCELLED", ())
    assert (accounting.queued_seconds, accounting.max_rss_bytes) == (None, None)


def test_times_without_our_format_and_what_is_metered() -> None:
    accounting = read_accounts(TEXT)["296"].accounting
    assert accounting.queued_seconds == 30
    assert accounting.cpu_seconds == 86400 + 2 * 3600 + 3 * 60 + 4
    assert accounting.max_rss_bytes == 2 * 2**30
    assert accounting.energy_joules == 2500


def test_why_a_job_once_waited_is_not_why_it_ended() -> None:
    """sacct keeps the last reason of a pending job: an end by the time limit was told with the array's limit."""
    account = read_accounts("JobID|State|Reason\n7_1|TIMEOUT|JobArrayTaskLimit\n")["7_1"]
    assert (account.accounting.state, account.reason) == ("TIMEOUT", "")


def test_steps_without_their_job_are_left_out() -> None:
    assert set(read_accounts(TEXT)) == {"295_0", "295_1", "296"}


def test_other_columns_in_another_order_are_read_by_their_names() -> None:
    assert read_accounts("State|Extra|JobID\nTIMEOUT|x|7\n")["7"].accounting.state == "TIMEOUT"


def test_a_text_that_holds_no_accounts_is_refused() -> None:
    with pytest.raises(ValueError, match="JobID"):
        read_accounts("slurm_load_jobs error\n")


def test_a_line_that_is_cut_off_and_figures_that_are_none_are_left_out() -> None:
    text = "Submit|ElapsedRaw|TotalCPU|MaxRSS|Start|JobID|State\n1|2\n²|nan|1|" + "9" * 400 + "G|0001-01-01|7|FAILED\n"
    accounts = read_accounts(text + "inf|inf|1-2:3|x|0000|8|FAILED\n")
    assert set(accounts) == {"7", "8"}
    accounting = accounts["7"].accounting
    assert (accounting.elapsed_seconds, accounting.max_rss_bytes, accounting.queued_seconds) == (None, None, None)


def test_nodes_that_cannot_be_read_keep_back_no_account() -> None:
    accounts = read_accounts("JobID|State|NodeList\n7|FAILED|node[01-\n8|TIMEOUT|node[01-02]\n")
    found = [(account.accounting.state, account.accounting.nodes) for account in accounts.values()]
    assert found == [("FAILED", ()), ("TIMEOUT", ("node01", "node02"))]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:08.131", 8.131), ("01:02:03", 3723), ("2-00:00:01", 172801), ("00:00:00", 0), ("", None), ("INVALID", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_seconds(text) == seconds


def test_the_call() -> None:
    assert sacct_command(["1", "2"]) == ["sacct", *SACCT_ARGUMENTS, "--jobs=1,2"]
