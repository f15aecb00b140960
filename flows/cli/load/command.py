"""`rankwise load URL`: measure any OpenAI-compatible completion server.

    rankwise load http://127.0.0.1:8000 --model m --rate 4 --duration 60
    rankwise load http://127.0.0.1:8000 --model m --users 8 --duration 60 --new-tokens 64 --exact
    rankwise load http://127.0.0.1:8000 --model m --find-max-rate --ttft 0.5 --tpot 0.05 --duration 120

Exit codes: 0 a result, 3 none (client-bound, no answers, or a search without an interval), 2 wrong argument, 1 another
error. Runs without Prefect.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer


def measure_server(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT of the server")],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="name of the model at the server")],
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="open loop: requests per second; with --find-max-rate the first")
    ] = None,
    users: Annotated[int | None, typer.Option(metavar="N", help="closed loop: users who wait for each answer")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="open loop: times and lengths from a file")
    ] = None,
    speed: Annotated[float, typer.Option(metavar="N", help="factor on the rate of the trace")] = 1.0,
    arrivals: Annotated[
        Literal["poisson", "gamma", "constant"], typer.Option(help="gaps between requests of an open loop")
    ] = "poisson",
    burstiness: Annotated[float, typer.Option(metavar="N", help="shape of gamma gaps; below 1 burstier")] = 0.5,
    think: Annotated[float, typer.Option(metavar="SECONDS", help="mean pause of a user, and between turns")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="of a run; default 60 without --requests and --trace")
    ] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="end a run after so many requests")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="one `prompt` or `tokens` per line; default: random ids")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTHS", help="of random prompts: 128, 16..256 or lognormal:128:0.7")
    ] = "128",
    new_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="of answers: the same forms")] = "128",
    vocabulary: Annotated[
        str, typer.Option(metavar="FROM..TO", help="token ids of random prompts, both included")
    ] = "10..999",
    shared_prefix: Annotated[int, typer.Option(metavar="N", help="token ids that random prompts share")] = 0,
    prefixes: Annotated[int, typer.Option(metavar="N", help="number of different shared prefixes")] = 1,
    turns: Annotated[int, typer.Option(metavar="N", help="requests of a conversation")] = 1,
    exact: Annotated[
        bool, typer.Option("--exact", help="ask for exactly --new-tokens: sends ignore_eos and min_tokens")
    ] = False,
    temperature: Annotated[float, typer.Option(metavar="0..2", help="of the answers; 0: greedy")] = 0.0,
    field: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="further field of every request: top_p=0.9")
    ] = None,
    ttft: Annotated[float | None, typer.Option(metavar="SECONDS", help="objective: time to first token")] = None,
    tpot: Annotated[float | None, typer.Option(metavar="SECONDS", help="objective: time per later token")] = None,
    e2e: Annotated[float | None, typer.Option(metavar="SECONDS", help="objective: whole request")] = None,
    share: Annotated[float, typer.Option(metavar="0..1", help="of requests that must meet the objectives")] = 0.99,
    find_max_rate: Annotated[
        bool, typer.Option("--find-max-rate", help="search for the highest rate that meets the objectives")
    ] = False,
    tolerance: Annotated[float, typer.Option(metavar="0..1", help="width of the interval to search for")] = 0.05,
    max_runs: Annotated[int, typer.Option(metavar="N", min=1, help="runs of a search")] = 40,
    max_rate: Annotated[
        float | None, typer.Option(metavar="N", help="cap: requests per second, bursts up to three times it")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="cap: tokens asked for in a run, prompts and answers")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="of a request")] = 300.0,
    token_variable: Annotated[
        str | None, typer.Option(metavar="NAME", help="environment variable with the bearer token; default: none sent")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="of arrivals, prompts and lengths; default: another in each command"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="folder of samples and figures; default load/<time>")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Send requests to an OpenAI-compatible server and print latencies, rates and a verdict."""
    from configs.common.secrets import shown_url
    from flows.cli.errors import guarded, plainly
    from flows.cli.load.request import LoadRequest, ShapeOptions, made_request, refuse_unused
    from flows.cli.load.run import run_request

    shape = ShapeOptions(rate, users, trace, speed, arrivals, burstiness, think)
    contents = {
        "prompts": None if prompts is None else str(prompts),
        "shared_prefix_tokens": shared_prefix,
        "prefixes": prefixes,
        "turns": turns,
        "think_seconds": think,
        "exact": exact,
        "temperature": temperature,
    }
    caps = {"max_rate": max_rate, "max_tokens": max_tokens, "timeout_seconds": timeout}
    bounds = {"ttft_seconds": ttft, "tpot_seconds": tpot, "e2e_seconds": e2e}
    search = (tolerance, max_runs) if find_max_rate else None

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}

    def work() -> int:
        refuse_unused(given, arrivals)
        request: LoadRequest = made_request(
            {"url": url, "model": model, "token_variable": token_variable},
            shape,
            contents,
            {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "vocabulary": vocabulary},
            field or [],
            caps,
            {"duration_seconds": duration, "max_requests": requests, "seed": seed},
            bounds,
            share,
            search,
        )
        return run_request(request, out, as_json)

    raise typer.Exit(guarded(lambda: plainly(work, OSError), Path(shown_url(url)), context.obj["debug"]))
