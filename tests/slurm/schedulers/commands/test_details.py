"""`scontrol --oneliner show job` as Slurm 22.05 prints it; times as SLURM_TIME_FORMAT=%s makes them."""

from slurm.schedulers.commands.details import details_command, read_details

LINE = (
    "JobId={job} {array}JobName=rw-1 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901758 Nice=0 "
    "Account=root QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 "
    "ExitCode=0:0 RunTime={ran} TimeLimit=UNLIMITED SubmitTime=1000 EligibleTime=1000 StartTime={started} "
    "EndTime=Unknown Partition=lab ReqNodeList=(null) ExcNodeList=n9 NodeList={nodes} BatchHost=n1 NumNodes=2 "
    "Comment=/runs/a b JobState=FAILED NodeList=n7 WorkDir=/tmp Power="
)


def line(job: str = "7", array: str = "", state: str = "RUNNING", reason: str = "None", nodes: str = "n[1-2]",
         ran: str = "1-00:00:02", started: str = "1004") -> str:  # fmt: skip
    return LINE.format(job=job, array=array, state=state, reason=reason, nodes=nodes, ran=ran, started=started)


def test_a_job_that_runs() -> None:
    details = read_details(line() + "\n")["7"]
    assert (details.state, details.nodes, details.reason) == ("RUNNING", ("n1", "n2"), "")
    assert details.accounting.queued_seconds == 4
    assert details.accounting.elapsed_seconds == 86402


def test_a_job_that_waits_has_no_nodes_and_no_time() -> None:
    waits = line(state="PENDING", reason="ReqNodeNotAvail, UnavailableNodes:n1", nodes="(null)", started="Unknown")
    details = read_details(waits)["7"]
    assert (details.state, details.nodes) == ("PENDING", ())
    assert details.reason == "ReqNodeNotAvail, UnavailableNodes:n1"
    assert details.accounting.queued_seconds is None and details.accounting.elapsed_seconds is None


def test_tasks_of_an_array_are_named_as_squeue_names_them() -> None:
    pending = line(array="ArrayJobId=7 ArrayTaskId=1-3,8,10-14:2%1 ", state="PENDING", nodes="")
    running = line(job="9", array="ArrayJobId=7 ArrayTaskId=0 ")
    found = read_details(f"{pending}\n{running}\n")
    assert set(found) == {f"7_{task}" for task in (0, 1, 2, 3, 8, 10, 12, 14)}
    assert (found["7_0"].state, found["7_8"].state) == ("RUNNING", "PENDING")


def test_what_cannot_be_read_is_no_job() -> None:
    assert read_details("") == {}
    assert read_details("slurm_load_jobs error: Invalid job id specified\nJobId=5\n") == {}
    assert read_details(line(nodes="n[1-")) == {}
    assert read_details(line(array="ArrayJobId=7 ArrayTaskId=N/A ")).keys() == {"7"}


def test_the_call() -> None:
    assert details_command("7_1") == ["scontrol", "--oneliner", "show", "job", "7_1"]
