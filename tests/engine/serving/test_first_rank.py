"""The first rank over a real socket, with steps one by one and with each launched behind the one before."""

import json
import socket
import tempfile
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.inference.paged import PagedSizes
from engine.inference.weights import shard_of
from engine.models.weights import synthetic_tensor
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.serving.blocks import BlockPool
from engine.serving.channel import Channel
from engine.serving.first_rank import FirstRank
from engine.serving.messages import ScoredToken, StepReport, WantedAnswer
from engine.serving.sampling import Sampling
from engine.serving.scheduling import Scheduler, SchedulerLimits
from engine.serving.step_message import StepMessage, TokenStep
from engine.serving.stepping import StepChoices, StepRunner

_SIZES = PagedSizes(blocks=60, block=4, sequences=5, max_length=48, max_tokens=24)
_DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
)


class Runner(StepRunner):
    """Counts steps that take tokens from the one before, and fails where a test wants it."""

    behind, mixed, failing, ahead = 0, 0, False, False

    @property
    def overlaps(self) -> bool:
        return self.ahead

    def run(self, step: TokenStep) -> StepChoices | None:
        self.behind += bool((step.tokens < 0).any())
        found = super().run(step)
        if found is None:
            return None
        self.mixed += found.logits is not None and len(found.logits) < len(found.tokens)
        tokens = found.tokens.clone()  # a recorded step on a CPU leaves its result where the next one does
        if self.failing and len(tokens) == _SIZES.sequences:
            row = next(row for row in range(len(tokens)) if row not in step.logit_rows.tolist())
            tokens[row], self.failing = -1, False
        return StepChoices(tokens, found.logits)


@dataclass
class Served:
    """What the HTTP process would have got."""

    tokens: dict[str, list[int]]
    reasons: dict[str, str]
    refused: dict[str, str]
    behind: int
    preemptions: int
    free_blocks: int
    scores: dict[str, list[ScoredToken]]


def runner_on(device: str, sizes: PagedSizes) -> Runner:
    config = ModelConfig.parse(ARCHITECTURES["llama-1m"] | {"initializer_range": 0.3})
    tensors = {name: synthetic_tensor(config, name, shape, 3) for name, shape in config.tensor_shapes().items()}
    moved = {name: tensor.float().to(device) for name, tensor in tensors.items()}
    shard = shard_of(config, Grid(1, 1, 1, 0), Communicator((0,), 0), moved)
    return Runner(shard, Communicator((0,), 0), shard.new_paged_cache(sizes))


def wanted_answers() -> list[WantedAnswer]:
    """More than there are slots: greedy ones, drawn ones, some that end with a word; half begin alike."""
    random = torch.Generator().manual_seed(5)
    words = torch.randint(10, 900, (24, 14), generator=random)
    words[::2, :9] = words[0, :9]
    answers = []
    for place, prompt in enumerate(words.tolist()):
        sampling = {
            3: Sampling(temperature=1.0, seed=place, presence_penalty=0.5),  # on the host
            5: Sampling(temperature=1.0, seed=place),
            6: Sampling(temperature=0.8, seed=place, top_p=0.9, top_k=40),
        }.get(place % 8, Sampling())
        answers.append(
            WantedAnswer(str(place), tuple(prompt[: 3 + place % 12]), max_tokens=2 + 3 * place % 25, sampling=sampling)
        )
    return answers


def serve(
    answers: list[WantedAnswer], ahead: bool, device: str, blocks: int = 60, cancel: str = "", failing: bool = False
) -> Served:
    """Serve the answers; cancel one of them when its second token has come."""
    sizes = replace(_SIZES, blocks=blocks)
    runner = runner_on(device, sizes)
    runner.ahead, runner.failing = ahead, failing
    pool = BlockPool(sizes.blocks, sizes.block)
    limits = SchedulerLimits(sizes.sequences, sizes.max_tokens, sizes.max_length)
    scheduler = Scheduler(limits, pool)
    message = StepMessage(
        sizes.max_tokens, sizes.sequences, sizes.max_length, sizes.block, torch.device("cpu"), limits.max_scored
    )
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen()
        channel = Channel(path)
        first = FirstRank(channel, scheduler, message, 0.2, defers=ahead)
        own, _ = listener.accept()
    thread = threading.Thread(target=first.lead, args=(runner, Communicator((0,), 0)))
    with closing(channel), own, own.makefile("r") as lines:
        own.sendall(b"".join(json.dumps(answer.message()).encode() + b"\n" for answer in answers))
        thread.start()
        served = Served({answer.key: [] for answer in answers}, {}, {}, 0, 0, 0, {})
        while len(served.reasons) + len(served.refused) < len(answers):
            told = json.loads(lines.readline())
            if "refused" in told:
                served.refused[told["refused"]["key"]] = told["refused"]["message"]
                continue
            report = StepReport.read(told["step"])
            assert not served.scores.keys() & report.scores.keys(), "told once"
            served.scores |= report.scores
            for key, token, reason, *_ in report.tokens:
                served.tokens[key].append(token)
                if reason is not None:
                    served.reasons[key] = reason
                if key == cancel and len(served.tokens[key]) == 2:
                    own.sendall(json.dumps({"cancel": key}).encode() + b"\n")
                    served.reasons[key] = "cancelled"
        own.sendall(b'{"end": true}\n')
        thread.join(600)
    assert not thread.is_alive()
    assert runner.mixed > 5, "rows for the host and others in one step"
    served.behind, served.preemptions, served.free_blocks = runner.behind, scheduler.counts.preemptions, pool.free
    return served


@pytest.mark.parametrize("device", _DEVICES)
def test_launching_ahead_changes_no_token(device: str) -> None:
    answers = wanted_answers()
    plain = serve(answers, ahead=False, device=device)
    stops = {key: tokens[len(tokens) // 2] for key, tokens in plain.tokens.items() if int(key) % 3 == 0}
    answers = [replace(one, stop_tokens=(stops[one.key],) if one.key in stops else ()) for one in answers]
    expected = serve(answers, ahead=False, device=device)
    got = serve(answers, ahead=True, device=device)
    assert expected.behind == 0 and got.behind > 20
    assert set(expected.reasons.values()) == {"stop", "length"}
    assert (got.tokens, got.reasons) == (expected.tokens, expected.reasons)
    assert got.free_blocks == expected.free_blocks == _SIZES.blocks


@pytest.mark.parametrize("device", _DEVICES)
def test_launching_ahead_waits_where_the_cache_is_full(device: str) -> None:
    answers = wanted_answers()
    expected = serve(answers, ahead=False, device=device)
    got = serve(answers, ahead=True, device=device, blocks=14)
    assert got.preemptions > 0 and got.behind > 0
    assert (got.tokens, got.free_blocks) == (expected.tokens, 14)


@pytest.mark.parametrize("device", _DEVICES)
def test_an_answer_that_is_cancelled_or_fails_while_a_step_behind_it_runs(device: str) -> None:
    answers = wanted_answers()
    expected = serve(answers, ahead=False, device=device)
    got = serve(answers, ahead=True, device=device, cancel="2", failing=True)
    (failed,) = got.refused
    assert "not finite" in got.refused[failed] and got.reasons["2"] == "cancelled"
    for key, tokens in expected.tokens.items():
        if key in ("2", failed):
            assert got.tokens[key] == tokens[: len(got.tokens[key])]
        else:
            assert got.tokens[key] == tokens
    assert got.free_blocks == _SIZES.blocks


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize(("ahead", "blocks"), [(False, 60), (True, 60), (True, 13)])
def test_prompts_are_scored_whatever_else_is_computed(device: str, ahead: bool, blocks: int) -> None:
    """In parts, behind other steps, and after a preemption; with the same bits, and the tokens of others as before."""
    answers = wanted_answers()
    expected = serve(answers, ahead=False, device=device)
    scored = {place for place in range(len(answers)) if place % 3 == 0}
    sampling = Sampling(logprobs=2)
    asked = [replace(one, sampling=sampling, scored=True) if int(one.key) in scored else one for one in answers]
    alone = {
        one.key: serve([one, *answers[1:3]], ahead=False, device=device).scores[one.key]
        for one in asked[3:7]
        if one.scored
    }
    got = serve(asked, ahead=ahead, device=device, blocks=blocks)
    assert (got.preemptions > 0) is (blocks == 13)
    assert set(got.scores) == {asked[place].key for place in scored if len(asked[place].prompt) > 1}
    for key, scores in got.scores.items():
        assert [one.token for one in scores] == list(answers[int(key)].prompt[1:])
        assert all(one.top[0][1] >= one.logprob and len(one.top) == 2 for one in scores)
    assert alone and all(got.scores[key] == scores for key, scores in alone.items())
    greedy = [one.key for one in answers if one.sampling.is_greedy or int(one.key) not in scored]
    assert {key: got.tokens[key] for key in greedy} == {key: expected.tokens[key] for key in greedy}
    assert got.free_blocks == blocks
