"""A plan of one model as text: explanation, memory, time, cost, candidates and what does not fit."""

from typing import Any

from configs.common.dollars import dollars
from configs.common.printable import plural
from flows.cli.tables import print_table

_SHOWN_OPTIONS = 8


def print_plan(config: dict[str, Any], choice: dict[str, Any] | None, training: bool) -> None:
    """Print a plan of `HardwareSelector`, and the choice of hardware behind it where there was one."""
    print(config["explanation"])
    if config["smallest_change"]:
        print(f"Smallest change  {config['smallest_change']}")
    if choice is not None:
        print(f"Hardware         {choice['explanation']}")
    if training:
        print(f"Rule of thumb    {config['rule_of_thumb']['sentence'].removeprefix('The rule of thumb says ')}")
        other = _own_script(config)
        if other:
            print(f"Other layouts    {other}")
    if "correction" in config:
        print(f"Correction       {config['correction']}")
    else:
        print(f"Predicted from   {config['support']}")
    if config["measure_next"]:
        print(f"Measure next     {config['measure_next']}")
    for note in dict.fromkeys([*config["assumptions"], *(choice["assumptions"] if choice else [])]):
        print(f"Assumed          {note}")
    print()
    _print_memory(config)
    if config["fits"]:
        print()
        _print_time(config, training)
    if config["fits"]:
        print(f"Cost             {_cost(config)}")
    print()
    _print_candidates(config["candidates"], training)
    _print_misfits(config["does_not_fit"])
    if choice is not None:
        print()
        _print_options(choice)


def _own_script(config: dict[str, Any]) -> str | None:
    """Return the predicted gain of tensor and pipeline parallelism or selective checkpointing."""
    best, mine = config["fastest_layout"], config["step_seconds"]
    if not best["fits"] or mine is None or best["step_seconds"] >= 0.98 * mine:
        return None
    gain = mine / best["step_seconds"] - 1
    return f"{best['title']} is predicted {gain:.0%} faster, but requires a training script that supports it"


def _print_memory(config: dict[str, Any]) -> None:
    memory = config["estimated_memory"]
    parts = {name.removesuffix("_gb"): size for name, size in memory.items()}
    outside = {"host": parts.pop("host"), "storage": parts.pop("storage")}
    parts.pop("total")
    whole = parts.pop("per_gpu")
    rows = [(name.replace("_", " "), f"{size:.2f}") for name, size in parts.items() if size >= 0.005]
    rows.append(("together", f"{whole:.2f}"))
    rows += [(f"offloaded to {name}", f"{size:.2f}") for name, size in outside.items() if size > 0]
    print_table(("memory per GPU", "GB"), rows)


def _print_time(config: dict[str, Any], training: bool) -> None:
    if training:
        parts = "  ".join(
            f"{name.removesuffix('_seconds').replace('_', ' ')} {_short(seconds)}"
            for name, seconds in config["predicted_time"].items()
            if name.endswith("_seconds") and seconds > 0
        )
        speed = f"{_rate(config['tokens_per_second'])} tokens/s, MFU {config['model_flops_utilization']:.0%}"
        print(f"Step             {_short(config['step_seconds'])} s per step {_range(config)}, {speed}")
        print(f"  seconds        {parts}")
        return
    line = f"Batch            {_short(config['batch_seconds'])} s per batch {_range(config)}"
    if config["new_tokens"]:
        line += f", TTFT {_short(config['ttft_seconds'])} s"
    if config["time_per_output_token_seconds"]:
        line += f", TPOT {_short(config['time_per_output_token_seconds'] * 1e3)} ms"
    print(f"{line}, {_rate(config['tokens_per_second'])} tokens/s")


def _range(config: dict[str, Any]) -> str:
    said = config["predicted_time"]
    return f"({_seconds(said['low'])} to {_seconds(said['high'])})"


def _seconds(value: float) -> str:
    """Return two digits, and every digit before the point."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def _cost(config: dict[str, Any]) -> str:
    usd, hour = config["usd_per_million_tokens"], config.get("usd_per_hour")
    if usd is None:
        kind = "spot price" if config["market"] == "spot" else "price"
        return f"not available: the catalog has no {kind} of {config['machine']}"
    rate = f", {dollars(hour)} USD per hour" if hour else ""
    spot = " at spot prices" if config["market"] == "spot" else ""
    return f"{_usd(usd)} USD per million tokens on {config['machine']}{rate}{spot}, for whole machines"


def _print_candidates(candidates: list[dict[str, Any]], training: bool) -> None:
    fitting = [each for each in candidates if each["fits"]]
    if not fitting:
        return
    if training:
        rows = [
            (
                each["title"],
                f"{each['per_gpu_batch_size']} x {each['gradient_accumulation_steps']}",
                _short(each["step_seconds"]),
                _rate(each["tokens_per_second"]),
                f"{each['per_gpu_gb']:.1f}",
                _usd(each["usd_per_million_tokens"]),
            )
            for each in fitting
        ]
        print_table(("fastest", "batch x accumulated", "s per step", "tokens/s", "GB per GPU", "USD/M tokens"), rows)
        return
    rows = [
        (
            each["title"],
            str(each["batch_size_per_replica"]),
            _short(each["batch_seconds"]),
            _rate(each["tokens_per_second"]),
            f"{each['per_gpu_gb']:.1f}",
            _usd(each["usd_per_million_tokens"]),
        )
        for each in fitting
    ]
    print_table(("fastest", "batch per replica", "s per batch", "tokens/s", "GB per GPU", "USD/M tokens"), rows)


def _print_misfits(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"Does not fit     {row['title']}: {row['why_not']}")


def _print_options(choice: dict[str, Any]) -> None:
    options = [*choice["options"], *choice["without_price"]]
    rows = [
        (
            f"{each['nodes']} x {each['instance']}" if each["nodes"] > 1 else each["instance"],
            f"{each['gpu_count']} x {each['accelerator']}",
            _rate(each["tokens_per_second"]),
            _usd(each["usd_per_million_tokens"]),
            "not known" if each["usd_per_hour"] is None else dollars(each["usd_per_hour"]),
            each["price_as_of"] or "-",
        )
        for each in _one_of_each(options)[:_SHOWN_OPTIONS]
    ]
    if rows:
        print_table(("hardware", "devices", "tokens/s", "USD/M tokens", "USD/h", "price of"), rows, words=2)
    fit, slow, large = len(options), len(choice["too_slow"]), len(choice["does_not_fit"])
    print(
        f"{plural(fit, 'choice')} {'fits' if fit == 1 else 'fit'}, {slow:,} {'is' if slow == 1 else 'are'} too slow, "
        f"{large:,} {'does' if large == 1 else 'do'} not fit"
    )


def _one_of_each(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best choice of each accelerator and of each CPU family."""
    best: dict[str, dict[str, Any]] = {}
    for each in options:
        name = each["accelerator"]
        best.setdefault(name.rpartition("-")[0] if each["hardware"] == "cpu" else name, each)
    return list(best.values())


def _rate(value: float) -> str:
    from engine.planner.choice.descriptions import rate

    return rate(value)


def _short(value: float) -> str:
    from engine.planner.choice.descriptions import short

    return short(value)


def _usd(value: float | None) -> str:
    return "not known" if value is None else _short(value)
