"""`rankwise init`: write a first study of a script, from its source or from a few questions; `rankwise schema`.

init_study(script, output, ranks, ask)   # returns the exit code
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from configs.common.base import WrongArgument
from configs.common.files.reading import brief
from configs.common.files.yaml_text import yaml_text
from configs.spec.schema import study_schema
from configs.spec.study import parse_study
from flows.cli.errors import resolved
from flows.cli.first_study.own_modules import OwnModules, own_modules
from flows.cli.first_study.script_reading import ScriptFacts, script_facts
from flows.cli.options import write_output

Ask = Callable[[str, str], str]
_MAX_TOLD = 8
"""Options that the command names; the file has all."""
_FIELDS = ("micro_batch_size", "accumulation_steps", "sequence_length")


def init_study(script: Path | None, output: Path, ranks: int, ask: Ask | None) -> int:
    """Write a study file and say what was found. Raises WrongArgument, ValueError and OSError."""
    if output.exists():
        raise WrongArgument(f"{output}: exists already. Use --output FILE for another name")
    if script is None and ask is None:
        raise WrongArgument("--from: required where no terminal can be asked. Use rankwise init --from train.py")
    if script is None:
        assert ask is not None
        script = Path(ask("Script to study", "train.py"))
    if not script.is_file():
        raise WrongArgument(f"--from: no such file: {script}")
    facts = script_facts(script)
    if ask is not None:
        facts.launcher = ask("Launcher (torchrun, deepspeed, accelerate, mpirun, srun, none)", facts.launcher)
        answer = ask("Largest number of ranks", str(ranks)).strip()
        if not answer.isdecimal() or int(answer) < 1:
            raise WrongArgument(f"Largest number of ranks: got {brief(answer)}, expected a whole number of at least 1")
        ranks = int(answer)
    folder = resolved(output).parent
    study = first_study(facts, _named(script.resolve(), folder), ranks, own_modules(script), folder)
    parse_study(study)  # what is written can be run
    write_output(output, commented(study, facts))
    print("\n".join(told(facts, script, output, study)))
    return 0


def first_study(facts: ScriptFacts, script: str, ranks: int, own: OwnModules, folder: Path) -> dict[str, Any]:
    """The study as plain data. own: what the script imports. folder: that of the study, which names are relative to."""
    command, fields, params = _command(facts, script)
    work: dict[str, Any] = {"kind": "script", "command": command, "launcher": facts.launcher, "inputs": [script]}
    if script.startswith("/"):
        work["command"] = [Path(script).name, *command[1:]]
    if own.module is not None:
        package, *others = own.inputs
        # Python finds it in the folder that the script runs in.
        names = [package.name if package.parent == folder else str(package), *(_named(each, folder) for each in others)]
        work |= {"command": ["python", "-m", own.module, *command[1:]], "inputs": names}
    else:
        work["inputs"] = [script, *(_named(each, folder) for each in own.inputs)]
    work |= fields | ({"params": params} if params else {})
    if facts.per != "step":
        # How many steps are in it is known to the script alone.
        work |= {"items_per_step": "{dp}", "unit": facts.per}
    elif facts.probe_unit is not None:
        # What is stated would count in place of the script's own.
        work |= {} if facts.probe_unit == "token" else {"unit": facts.probe_unit}
    elif {"micro_batch_size", "sequence_length"} <= set(fields):
        factors = [f"{{{name}}}" for name in _FIELDS if name in fields]
        work["tokens_per_step"] = " * ".join([*factors, "{dp}"])
    else:
        # Two ranks make as many steps as one, of twice the work: weak scaling in steps would be half of what it is.
        factors = [f"{{{name}}}" for name in _FIELDS if name in fields and name != "sequence_length"]
        work["items_per_step"] = " * ".join([*factors, "{dp}"])
        work["unit"] = "sample" if "micro_batch_size" in fields else "batch"
    work["measure"] = facts.measure
    if facts.pattern:
        work["lines"] = {"pattern": facts.pattern}
        if "(?P<step_seconds>" in facts.pattern and facts.unit != "s":
            work["lines"]["units"] = {"step_seconds": facts.unit}
    if facts.measure != "wall" and (facts.measure != "lines" or facts.per != "run"):
        work["stop_after"] = {"steps": 3 if facts.per == "epoch" else 30}
    experiments: dict[str, Any] = {"repeats": {"kind": "sweep", "over": {"cores_per_rank": [1]}}}
    if facts.launcher != "none":
        experiments = {"scaling": {"kind": "weak", "grow": "dp", "to": ranks}}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-.") or "script"
    measuring = {"repeats": 3, "memory": False}
    return {"study": name, "workload": work, "experiments": experiments, "measuring": measuring}


def _command(facts: ScriptFacts, script: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """(command, fields of the workload, params): each option with a known meaning, at its default."""
    command, fields, params = [script], {}, {}
    for option in facts.options:
        value = option.default
        if option.command is not None and option.command not in command:
            command.append(option.command)
        if option.role == "seed":
            command += [option.flag, "{repeat}"]
        elif option.role in _FIELDS and option.role not in fields and _whole(value):
            fields[option.role] = value
            command += [option.flag, f"{{{option.role}}}"]
        elif option.role == "lr" and "lr" not in params and isinstance(value, int | float):
            params["lr"] = value
            command += [option.flag, "{params.lr}"]
    command += [facts.command] if facts.command is not None and facts.command not in command else []
    return [*command, *facts.fixed], fields, params


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def commented(study: dict[str, Any], facts: ScriptFacts) -> str:
    """The file, with what to change next."""
    head = ["# Written by `rankwise init`. The guide is docs/how-to/own-program.md."]
    if facts.measure == "wall":
        head += [
            "# The whole run is timed. To time steps, add to the script:  from rankwise_probe import step",
            "# and in its loop:  step(tokens=..., loss=loss)",
            "# Then set measure: probe, and leave items_per_step and unit out.",
        ]
    if facts.per != "step":
        head += [
            f"# Throughput counts {facts.per}s, one of each rank. To count what is trained on, set items_per_step to",
            f"# the samples of a whole {facts.per} over all ranks, and unit: sample.",
        ]
    if facts.pattern and "(?P<units_per_second>" in facts.pattern:
        stated = "tokens_per_step" if "tokens_per_step" in study["workload"] else "items_per_step and unit"
        head += [
            f"# Its lines have a rate, of the job or of one rank: throughput is counted by {stated}.",
            f"# To report the rate of its lines, leave {stated} out. One rank's is the group rank_units_per_second.",
        ]
    if len(facts.commands) > 1:
        head += [f"# Of the script's commands ({', '.join(facts.commands)[:200]}), {facts.command} is measured."]
    missing = _missing(facts, study)
    if missing:
        head += [f"# The script does not start without {', '.join(missing)[:300]}: add a value to command."]
    command = study["workload"]["command"]
    others = [option.flag for option in facts.options if option.flag not in (*command, *missing)]
    if others:
        head += [f"# Further options of the script: {' '.join(others)[:300]}"]
    return "\n".join(head) + "\n" + yaml_text(study)


def told(facts: ScriptFacts, script: Path, output: Path, study: dict[str, Any]) -> list[str]:
    """What was found and what was written."""
    flags = ", ".join(option.flag for option in facts.options[:_MAX_TOLD]) or "no options of argparse or click"
    flags += f" and {more:,} more" if (more := len(facts.options) - _MAX_TOLD) > 0 else ""
    printed = f'; prints "{facts.printed}"' if facts.printed else ""
    name = script.name if facts.command is None else f"{script.name} {facts.command}"
    found = [f"{name} takes {flags}{printed}"]
    lines = "the whole run is read from a line" if facts.per == "run" else f"{facts.per}s are read from its lines"
    measured = {"wall": "the whole run is timed", "lines": lines}
    how = measured.get(facts.measure, f"steps are measured by {facts.measure}")
    experiment = study["experiments"].get("scaling")
    what = "one cell of one process, without a launcher, so --ranks has no effect"
    if experiment:
        what = f"weak scaling over dp = 1 to {experiment['to']}, {facts.launcher}"
    missing = ", ".join(_missing(facts, study))[:300]
    then = f"add a value of {missing} to its command, then" if missing else "next:"
    return [*found, f"wrote {output}: {what}; {how}", f"{then} rankwise run {quote(str(output))}"]


def _missing(facts: ScriptFacts, study: dict[str, Any]) -> list[str]:
    """What the script requires and the written command lacks."""
    return [name for name in facts.required if name not in study["workload"]["command"]]


def _named(path: Path, folder: Path) -> str:
    """A path as a study in that folder names it."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def print_schema() -> int:
    """Print the JSON schema of a study file."""
    print(json.dumps(study_schema(), indent=1))
    return 0
