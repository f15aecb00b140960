import json
from collections.abc import Sequence
from pathlib import Path

from configs.load.arrivals import PoissonArrivals
from configs.load.job import Contents, Endpoint, LoadJob
from configs.load.lengths import UniformLengths
from engine.load.arrivals import TraceRow
from engine.load.contents import RequestSource, body_of


def ids(prompt: str | list[int]) -> list[int]:
    assert isinstance(prompt, list)
    return prompt


def test_a_conversation_is_the_same_in_every_run_of_a_seed() -> None:
    contents = Contents(prompt_tokens=UniformLengths(low=3, high=40), new_tokens=UniformLengths(low=1, high=9))
    first, again, other = (RequestSource(contents, seed) for seed in (5, 5, 6))
    turns = [source.conversation(3).first() for source in (first, again, other)]
    assert turns[0] == turns[1] != turns[2]
    assert first.conversation(4).first() != turns[0]


def test_prompts_share_as_many_prefixes_as_asked_for() -> None:
    source = RequestSource(Contents(prompt_tokens=5, shared_prefix_tokens=20, prefixes=3), 0)
    prompts = [ids(source.conversation(number).first().prompt) for number in range(60)]
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 3
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 60


def test_random_ids_stay_in_the_vocabulary() -> None:
    source = RequestSource(Contents(prompt_tokens=500, vocabulary=(7, 9)), 0)
    assert set(ids(source.conversation(0).first().prompt)) == {7, 8}


def test_turns_of_ids_repeat_what_came_before() -> None:
    talk = RequestSource(Contents(prompt_tokens=4, turns=2), 0).conversation(0)
    first, second = talk.first(), talk.following("ignored", 6)
    assert ids(second.prompt)[:4] == first.prompt
    assert second.prompt_tokens == 4 + 6 + 4


def prompts_file(folder: Path, texts: Sequence[str]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return str(file)


def test_turns_of_text_carry_the_answer(tmp_path: Path) -> None:
    source = RequestSource(Contents(prompts=prompts_file(tmp_path, "abc"), turns=2), 0)
    one, two, three = ("abc"[(source.first_prompt + place) % 3] for place in range(3))
    talk = source.conversation(1)
    assert talk.first().prompt == three
    assert talk.following(" answer", 1).prompt == f"{three} answer\n{one}"
    talk = source.conversation(0)
    assert (talk.first().prompt, talk.following("", 1).prompt) == (one, f"{one}\n{two}")


def test_runs_begin_at_different_prompts_of_a_file(tmp_path: Path) -> None:
    """Each began with the first one: in the second run of a server its cache had them all, and TTFT was too short."""
    contents = Contents(prompts=prompts_file(tmp_path, [str(number) for number in range(1000)]))
    begun = [RequestSource(contents, seed).conversation(0).first().prompt for seed in range(20)]
    assert len(set(begun)) > 15
    source = RequestSource(contents, 3)
    sent = [source.conversation(number).first().prompt for number in range(1000)]
    assert sent[0] == begun[3] and len(set(sent)) == 1000


def test_lengths_of_a_trace_are_those_of_the_request() -> None:
    source = RequestSource(Contents(prompt_tokens=100, new_tokens=100), 0)
    turn = source.conversation(0, TraceRow(0.0, 12, 34)).first()
    assert (turn.prompt_tokens, turn.new_tokens) == (12, 34)
    turn = source.conversation(0, TraceRow(0.0, None, 34)).first()
    assert turn.prompt_tokens == 100


def test_fixed_lengths_are_asked_for_in_the_body() -> None:
    job = LoadJob(
        endpoint=Endpoint(url="http://h", model="m"),
        arrivals=PoissonArrivals(rate=1),
        contents=Contents(new_tokens=9, exact=True, fields={"top_p": 0.5}),
        duration_seconds=1,
    )
    turn = RequestSource(job.contents, 0).conversation(0).first()
    body = json.loads(body_of(turn, job))
    assert body.items() >= {"max_tokens": 9, "min_tokens": 9, "ignore_eos": True, "top_p": 0.5, "stream": True}.items()
    assert body["stream_options"] == {"include_usage": True}
    loose = job.model_copy(update={"contents": Contents(new_tokens=9)})
    assert not {"min_tokens", "ignore_eos"} & json.loads(body_of(turn, loose)).keys()
