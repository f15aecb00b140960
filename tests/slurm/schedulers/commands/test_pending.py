"""Slurm's reasons to let a job wait, or not to take it: what will never pass, what a person must do."""

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.pending import field_to_correct, is_held, is_ordinary, pending_note, refusal_reason
from slurm.schedulers.commands.submission import sbatch_refusal
from slurm.schedulers.refusals import Limited, Refused, Unavailable

PARTITION = "sbatch: error: Batch job submission failed: Invalid partition name specified"
UNSPECIFIED = "sbatch: error: Batch job submission failed: Unspecified error"
AGAIN = "sbatch: error: Batch job submission failed: Unable to create job record, try again"
POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("reason", "field"),
    [
        ("PartitionTimeLimit", "time_limit_minutes"),
        ("QOSMaxNodePerJobLimit", "nodes"),
        ("AssocMaxNodePerJobLimit", "nodes"),
        ("QOSMaxCpuPerJobLimit", "cores_per_rank"),
        ("QOSMaxCpuPerNode", "cores_per_rank"),
        ("AssocMaxGRESPerJob", "gpus_per_node"),
        ("QOSMaxMemoryPerJob", "memory_per_node"),
        ("QOSMaxWallDurationPerJobLimit", "time_limit_minutes"),
        ("AssocMaxCpuMinutesPerJobLimit", "time_limit_minutes"),
        ("QOSMinCpuNotSatisfied", "cores_per_rank"),
        ("QOSMinGRES", "gpus_per_node"),
        ("QOSMaxBillingPerJob", "qos"),
        ("AssocMaxLicensePerJob", "account"),
        # these pass when others end, or when somebody acts
        ("QOSMaxNodePerUserLimit", None),
        ("QOSMaxJobsPerUserLimit", None),
        ("AssocGrpCpuLimit", None),
        ("AssocGrpCPUMinutesLimit", None),
        ("JobHeldUser", None),
        ("Resources", None),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", None),
        ("", None),
    ],
)
def test_what_will_never_pass_names_a_field_of_the_target(reason: str, field: str | None) -> None:
    assert field_to_correct(reason) == field
    assert field is None or field in SlurmTarget.model_fields


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "job requeued in held state"])
def test_a_held_job_is_told_with_what_releases_it(reason: str) -> None:
    assert is_held(reason) and not is_ordinary(reason)
    assert pending_note("12_3", reason) == f"job 12_3 held: {reason}. `scontrol release 12_3` lets it start"
    assert "`scontrol --clusters=b release 12` lets" in pending_note("12", reason, "b")  # there is another job 12
    assert pending_note("12", "Resources") == "job 12 pending: Resources"
    assert pending_note("12", "None") == "job 12 pending"


@pytest.mark.parametrize(
    ("words", "kind", "named"),
    [
        (f"sbatch: error: QOSMaxNodePerJobLimit\n{POLICY}", Refused, "target.nodes 2 of c: sbatch: QOS"),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}", Refused, "target.time_limit_minutes of c"),
        # DenyOnLimit looks at the job by itself: a limit of a user, too, will never let it pass
        (f"sbatch: error: QOSMaxNodePerUserLimit\n{POLICY}", Refused, "target.nodes 2"),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}", Limited, "QOSMaxSubmitJobPerUserLimit"),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", Limited, "AssocMaxSubmitJobLimit"),
        (f"sbatch: error: AssocGrpSubmitJobsLimit\n{POLICY}", Limited, "AssocGrpSubmitJobsLimit"),
        (POLICY, Limited, "accounting/QOS policy"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", Unavailable, "contact"),
        *(
            (f"sbatch: error: Batch job submission failed: {words}", Unavailable, words)
            for words in (
                "Zero Bytes were transmitted or received",
                "Slurm backup controller in standby mode",
                "Message receive failure",
                "Rate limit exceeded, please retry later",
                "Process is shutting down and closing all communications",
                "I/O error writing script/environment to file",
            )
        ),
        # What a site's plugin tells the user comes first: it was taken for a scheduler that is away, for ever.
        (f"sbatch: error: Add --account and try again\n{UNSPECIFIED}", Refused, "target.account of c: sbatch: Add"),
        # sites make options mandatory in words of their own
        (f"sbatch: error: You must specify an account (-A)\n{UNSPECIFIED}", Refused, "target.account of c"),
        (f"sbatch: error: No account given, see `projects`\n{UNSPECIFIED}", Refused, "target.account of c"),
        (f"sbatch: error: Please choose a partition\n{UNSPECIFIED}", Refused, "target.partition of c"),
        (f"sbatch: error: --time is required\n{UNSPECIFIED}", Refused, "target.time_limit_minutes of c"),
        (f"sbatch: error: Connect to login2 first\n{UNSPECIFIED}", Refused, "target c: sbatch: Connect to"),
        (f"sbatch: Reconnecting budget\n{PARTITION}", Refused, "target.partition of c: sbatch: Reconnecting"),
        (f"sbatch: error: Submission is temporarily disabled\n{UNSPECIFIED}", Unavailable, "temporarily disabled"),
        (f"sbatch: Budget: 3 h left\n{AGAIN}", Unavailable, "Budget: 3 h left; Batch job submission failed: Unable"),
        ("sbatch: error: Batch job submission failed: MaxJobCount limit reached", Limited, "MaxJobCount"),
        ("sbatch: error: Batch job submission failed: Invalid job array specification", Limited, "job array"),
        *(
            (f"sbatch: error: Batch job submission failed: {words}", Refused, "target.partition of c: sbatch")
            for words in (
                "User's group not permitted to use this partition",
                "Required partition not available (inactive or drain)",
                "No partition specified or system default partition",
            )
        ),
        ("sbatch: error: Invalid accounting frequency requested", Refused, "target c: sbatch: Invalid accounting"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", Refused, "target.qos"),
        (f"sbatch: error: invalid partition specified: standby\n{PARTITION}", Refused, "target.partition of c: sbatch"),
        (f"sbatch: error: invalid partition specified: interconnect\n{PARTITION}", Refused, "target.partition of c"),
        ("sbatch: unrecognized option '--standby'\nTry \"sbatch --help\"", Refused, "target.extra"),
    ],
)  # fmt: skip
def test_what_sbatch_refuses_for_ever_for_now_and_for_want_of_an_answer(
    words: str, kind: type[Exception], named: str
) -> None:
    error = sbatch_refusal(words, SlurmTarget(name="c", nodes=2))
    assert type(error) is kind
    assert named in str(error)


@pytest.mark.parametrize(
    ("words", "may"),
    [
        ("Unable to contact slurm controller (connect failure)", False),
        ("Unable to contact slurm controller (receive failure)", True),
        ("Socket timed out on send/recv operation", True),
    ],
)
def test_what_sbatch_could_not_connect_for_was_not_taken(words: str, may: bool) -> None:
    error = sbatch_refusal(f"sbatch: error: Batch job submission failed: {words}", SlurmTarget(name="c"))
    assert isinstance(error, Unavailable) and error.may_have_taken is may


def test_the_limit_among_sbatchs_words() -> None:
    assert refusal_reason(f"sbatch: error: QOSMinGRES\n{POLICY}") == "QOSMinGRES"
    assert refusal_reason(POLICY) is None
