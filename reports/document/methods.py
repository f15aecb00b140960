"""The question that each section answers, and how its figures came about."""

from reports.document.structure import Markdown

QUESTIONS = {
    "strong": "Do more ranks finish the same work sooner?",
    "weak": "Do more ranks do more work in the same time?",
    "sweep": "Which value is best, and what does it take in memory?",
    "optimization": "What does each variant gain over the baseline?",
    "compression": "What do smaller weights gain, and what do they cost the answers?",
    "layouts": "Which layout is fastest, and did the prediction find it?",
    "load": "What load does a server carry, and at what latency?",
    "communication": "What do the links carry?",
    "targets": "Which layout is fastest on each target?",
    "profile": "Where does the time of a pass go?",
    "perf": "What do the hardware counters say?",
    "correctness": "Are the answers those of the reference?",
    "recommendations": "Which cell is best for which goal?",
    "objectives": "Are the objectives met?",
    "cost": "What does it cost?",
    "fronts": "Which cells are beaten by no other?",
    "nodes": "How do the nodes compare?",
    "prediction": "Was the plan right?",
    "resources": "How much memory and CPU does it take?",
    "scheduler": "What did the scheduler account for?",
    "rentals": "What was rented, and was it given back?",
    "preflight": "Were the nodes sound?",
    "failures": "What has no figure, and why?",
    "how": "How was it measured, and on what?",
    "training": "Does it learn, and how fast?",
    "strategies": "Which strategy of data parallelism is fastest?",
    "own programs": "How fast is your program, and do its losses agree?",
}

METHODS = {
    "strong": Markdown(
        "The total work is fixed and shared out over more ranks. Speed-up is throughput over the baseline's; "
        "efficiency is speed-up over the growth in ranks."
    ),
    "weak": Markdown(
        "The work of each rank is fixed, so the total grows with the ranks. Speed-up is throughput over the "
        "baseline's; efficiency is throughput(n) / (n × throughput of the baseline a rank)."
    ),
    "optimization": Markdown(
        "A gain is the ratio of a variant to the baseline of the same block, measured close to it in time; "
        "the median and range are over such pairs."
    ),
    "compression": Markdown(
        "Each pass against the uncompressed model in the same engine and layout. Ratios of speed are over "
        "pairs of the same block; answers are compared with those of the uncompressed model on the same "
        "prompts: teacher-forced perplexity with its standard error (prompts are the sample), divergence of "
        "the next token, and the first greedy token that differs. In the figure a star is the base, what no "
        "other pass beats in both is filled and joined, and the dotted line is what a recommendation may "
        "lose."
    ),
    "layouts": Markdown(
        "Every layout that the ranks at hand allow, in the order of its predicted speed; those predicted "
        "fastest that this version can measure were measured."
    ),
    "load": Markdown(
        "Requests against a server. Latencies count from when a request should have been sent. Figures are of "
        "the steady part of each run; a run in which the load generator was the bottleneck is void. Answers "
        "under load are compared with those of the same requests alone: a first difference at a near-tie is "
        "noise of reduction orders. Goodput counts requests that were due in that part and met all objectives, "
        "achieved those that ended in it: over a short part either can be the larger."
    ),
    "communication": Markdown(
        "Bandwidths follow the convention of nccl-tests: of the algorithm, size by time; of the bus, times "
        "what an optimal algorithm moves through each rank's link for every byte."
    ),
    "targets": Markdown(
        "The same points on each target. A ratio is to the baseline on the same target, over pairs of the "
        "same block; what tells two targets apart beside their links is not in it. In the figure targets "
        "stand at equal distances: where two lines cross, another layout wins."
    ),
    "profile": Markdown(
        "One pass of each cell, recorded apart from the timed ones. Communication is the time in which at "
        "least one collective was in flight, waiting for other ranks included; it is exposed where nothing is "
        "computed meanwhile. Compute, exposed communication and idle sum to the pass. Figures are means over "
        "the ranks, in [brackets] stands their range."
    ),
    "perf": Markdown("One pass of each cell, after warm-up, in a launch of its own; nothing of that launch is timed."),
    "correctness": Markdown(
        "Greedy tokens, logits and likelihoods of the same prompts, against unmodified transformers on one "
        "rank in float32, one prompt at a time. In parentheses, beside each figure: the largest that the same "
        "figure is when only the order of reduction is changed in the reference's own model, in the precision "
        "of the cell (the noise). **agrees**: no statistic of the answers exceeds what the noise explains; "
        "tokens may differ where the reference's margin is within it. **defect**: at least one does, or "
        "answers are missing, not finite, or unequal between the ranks of a replica; the worst is named. "
        "16-bit noise hides small defects, so each layout is judged in float32 too, and a defect there counts "
        "for both. Method and limits: docs/explanation/correctness.md."
    ),
    "recommendations": Markdown(
        "The best cell for each goal among cells that do the same work, however many ranks it takes, and by how much "
        "it beats the next; the ratio is over pairs of the same block and corrected for having chosen the best of all "
        "candidates. The opening recommends by work per rank, or per dollar where prices are known: "
        "docs/explanation/decision.md."
    ),
    "objectives": Markdown(
        "**met** and **missed** need the whole 95 % interval on one side of the bound; anything else is undecided."
    ),
    "study cost": Markdown(
        "Start-up is from the launcher's turn on the machine to the first measurement. Failed attempts are "
        "measurements that left no figure, and launches that reached none. Idle is the time between launches."
    ),
    "resources": Markdown(
        "Peak memory is of a pass of its own, untimed, in a fresh process, and of the work alone: what "
        "loading the model takes for a moment is a column of its own. Growth is over what the process held "
        "before. CPU figures are of the timed measurements: CPU seconds over the seconds that the ranks' own "
        "cores had, and the largest share of the machine that other processes took during a repeat. A "
        "measurement is the wall time of the slowest rank from the cell's first moment to its last, loading "
        "of the model (where the measurement is its launch's first), warm-up and all passes included. What "
        "was read from and written to storage is what the kernel counts for the ranks; a file that is in the "
        "page cache is not read again. GPU in use is the share of it in which a kernel ran."
    ),
    "scheduler": Markdown(
        "From the scheduler's accounts of the study's jobs. A job starts the ranks once and measures several "
        "cells; running and CPU time include starting them. In the queue and running are medians over jobs; "
        "cores in use is CPU time over what the ranks' own cores had while the job ran; the largest task is "
        "the most memory that one node's processes held together, as the scheduler sampled it."
    ),
    "rentals": Markdown(
        "Each request was for all nodes at once. Nodes cost money from the answer of the request until they "
        "are given back; the dollars are the price an hour times that, of runs that were killed too."
    ),
    "preflight": Markdown(
        "Before anything was measured, every rank of each node multiplied matrices and read memory, and pairs "
        "of nodes summed tensors."
    ),
}
