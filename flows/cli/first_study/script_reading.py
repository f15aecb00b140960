"""What a training script shows of itself without being run: its arguments, its framework, the lines that it prints.

    facts = script_facts(Path("train.py"))         # ScriptFacts(options=..., launcher="torchrun", measure="lines", ...)

The source is parsed, never imported: nothing of it runs.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from configs.common.files.reading import read_bytes
from flows.cli.first_study.clocks import span_of_several
from flows.cli.first_study.hf_arguments import HfArguments
from flows.cli.first_study.own_modules import imported_by_own
from flows.cli.first_study.subcommands import Subcommands

_MAX_BYTES = 4 << 20
_HAVE_TRAINERS = {"transformers", "trl", "sentence_transformers"}
"""Their Trainers are that of transformers, or derived from it."""
_FRAMEWORKS = {"torch", "jax", "tensorflow", "lightning", "pytorch_lightning", *_HAVE_TRAINERS}
_ROLES = {
    "micro_batch_size": r"(micro|per_device_(train_)?|per_gpu_|train_)?_?batch(_size)?|bs|mbs",
    "accumulation_steps": r"(grad(ient)?_)?accum(ulation)?(_steps)?",
    "sequence_length": r"seq(uence)?_?len(gth)?|max_(seq_)?len(gth)?|block_size|context(_length)?",
    "lr": r"lr|learning_rate",
    "seed": r"(random_)?seed",
}
"""Field of a study -> names of options that mean it."""
_WITHOUT_VALUE = ("store_true", "store_false", "store_const", "append_const", "count")
"""Actions of argparse's flags."""
_TRAINER_RUNS_SHORT = (
    "--output_dir", "out", "--max_steps", "32", "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"
)  # fmt: skip
_NUMBER = r"[-+0-9.,eE]+"
_LOSS = _NUMBER + r"|[-+]?(?:nan|inf)"
_SUFFIX = re.compile(r"[kKMG](?![A-Za-z0-9])")
"""Written right behind an inserted number: 8.1k. It belongs to the number."""
_SINCE_THE_START = re.compile(r"\b(total|elapsed)\b(?!.*\bper\b)")
"""Before a time: it is of no single step."""
_OF_SEVERAL = re.compile(r"\b(steps|iters|iterations|batches)\b")
"""Before a time, too: `time of the last 10 steps`."""
_STEP_WORD = re.compile(r"\W*(global_?step|step|iter|iteration|it|batch)(_(idx|num))?\W*")
"""Before the number of a step."""
_STEP_NAME = re.compile(r"(\w+\.)*(global_step|step|iteration|iter_num|batch_idx|it)( \+ 1)?")
"""The name of such a number, where no word is before it: [{step}/{steps}]."""
_OF_STEPS = re.compile(
    r"(?<![a-z])(it|iter|iteration|step|batch|epoch)(e?s)?(/s|_?per_?s)|flop|bytes?_?per|[kmg]i?b_?(/|per)"
)
"""A rate of no tokens or samples."""
_SAMPLES = re.compile(r"\blen\(|batch_?size|\.shape\[0\]|\.size\(0\)")
_TOKENS = re.compile(r"tok|seq|block|numel|length|context|mask|ids")
"""In what is passed to the probe as tokens: a number of samples, of tokens."""
_EVALUATION = re.compile(r"(?<![a-z])(val|valid|validation|eval|evaluation|test)(?![a-z])")
"""In a line that tells of no training."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""What a reader of lines removes before it looks at one."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MAX_LINE = 200

Timed = Literal["step", "epoch", "run"]
PrintedLine = tuple[str, str, str, Timed]
"""(as its author wrote it, its pattern, unit of its time, what it is printed for)."""


@dataclass(frozen=True)
class ScriptOption:
    """One option of the script. default: as written; None where it has none, or no plain one."""

    flag: str
    default: int | float | str | bool | None
    role: str | None
    command: str | None = None
    """The subcommand that it is an option of, behind whose name it stands."""


_TRAINING_ARGUMENTS = [
    ScriptOption("--per_device_train_batch_size", 8, "micro_batch_size"),
    ScriptOption("--learning_rate", 5e-5, "lr"),
    ScriptOption("--seed", 42, "seed"),
]
"""Of transformers.TrainingArguments, with its defaults."""


@dataclass
class ScriptFacts:
    """What was found. pattern: of its printed lines, with the line as its author wrote it in `printed`."""

    options: list[ScriptOption] = field(default_factory=list)
    launcher: str = "torchrun"
    measure: str = "wall"
    pattern: str | None = None
    printed: str | None = None
    unit: str = "s"
    """Of the time of a step in that line."""
    per: Timed = "run"
    """What is timed: a step as the script counts it, or all of an epoch or of the run."""
    fixed: tuple[str, ...] = ()
    """Arguments without which the script would not start, or would do more than is measured."""
    probe_unit: str | None = None
    """What the script itself passes to the probe with its steps; None: nothing."""
    required: tuple[str, ...] = ()
    """Arguments and options that the script does not start without, and whose value nobody here knows."""
    commands: tuple[str, ...] = ()
    command: str | None = None
    """Subcommands, and the one that is measured."""


def script_facts(path: Path) -> ScriptFacts:
    """Look through a script. Raises OSError, and ValueError for a file that is no Python."""
    try:
        tree = ast.parse(read_bytes(path, _MAX_BYTES))  # in the encoding that its first lines name
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path}: not a Python script ({getattr(error, 'msg', 'too deeply nested')})") from error
    imported = set(_imports(tree))
    commands = Subcommands(tree)
    facts = ScriptFacts(
        options=sorted(_options(tree, commands), key=lambda option: option.command is not None),
        required=tuple(dict.fromkeys(_required(tree, commands))),
        commands=commands.names,
        command=commands.chosen,
    )
    called = {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    of_hf = HfArguments(tree)
    if of_hf.trains:
        facts.options += _TRAINING_ARGUMENTS
        facts.fixed = _TRAINER_RUNS_SHORT
    facts.required += tuple(of_hf.required)
    if "deepspeed" in imported:
        facts.launcher = "deepspeed"
    elif "accelerate" in imported:
        facts.launcher = "accelerate"
    elif not _FRAMEWORKS & (imported | imported_by_own(path)):
        facts.launcher = "none"
    if "rankwise_probe" in imported:
        facts.measure, facts.probe_unit = "probe", _unit_of_probe(tree)
    elif _HAVE_TRAINERS & imported and any(name.endswith("Trainer") for name in called):
        facts.measure = "hf_trainer"
    elif {"lightning", "pytorch_lightning"} & imported and "Trainer" in called:
        facts.measure = "lightning"
    else:
        found = next(_printed(tree), None)
        if found is not None:
            facts.measure, (facts.printed, facts.pattern, facts.unit, facts.per) = "lines", found
    if facts.measure not in ("wall", "lines"):
        facts.per = "step"
    return facts


def _name(function: ast.expr) -> str:
    """The last name of what is called."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _unit_of_probe(tree: ast.AST) -> str | None:
    """What a script passes to the probe's `step` as tokens: those, or the samples of a batch; None where nothing."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _name(call.func) == "step":
            named = [each.value for each in call.keywords if each.arg == "tokens"]
            given = named or (call.args[:1] if isinstance(call.func, ast.Name) else [])
            if given:
                text = ast.unparse(given[0]).lower()
                return "sample" if _SAMPLES.search(text) and not _TOKENS.search(text) else "token"
    return None


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _options(tree: ast.AST, commands: Subcommands) -> Iterator[ScriptOption]:
    """Options of argparse and of click, in the order of the source."""
    seen = set()
    for names, call in _declared(tree, "add_argument", "option"):
        flag = next((name for name in names if name.startswith("--")), None)
        if flag is None or flag in seen or flag in ("--local_rank", "--local-rank") or not commands.is_measured(call):
            continue
        seen.add(flag)
        given = {each.arg: each.value for each in call.keywords}
        action = _plain(given.get("action"))
        if action in ("help", "version"):
            continue
        role = None if action in _WITHOUT_VALUE or _plain(given.get("is_flag")) is True else _role(flag)
        yield ScriptOption(flag, _plain(given.get("default")), role, commands.owner(call) or None)


def _required(tree: ast.AST, commands: Subcommands) -> Iterator[str]:
    """Names of positional arguments, and of options that say `required=True`."""
    for names, call in _declared(tree, "add_argument", "option", "argument"):
        if not commands.is_measured(call):
            continue
        given = {each.arg: _plain(each.value) for each in call.keywords}
        flag = next((name for name in names if name.startswith("-")), None)
        of_click = getattr(call.func, "attr", getattr(call.func, "id", "")) == "argument"
        optional = given.get("nargs") in (("?", "*") if not of_click else (-1,)) or given.get("required") is False
        if flag is not None and given.get("required") is True:
            yield next((name for name in names if name.startswith("--")), flag)
        elif names and flag is None and not optional and not (of_click and "default" in given):
            yield names[0]


def _declared(tree: ast.AST, *functions: str) -> Iterator[tuple[list[str], ast.Call]]:
    """Calls of these functions in the order of the source, with the texts among their arguments."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in functions:
            yield [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)], call


def _plain(node: ast.expr | None) -> int | float | str | bool | None:
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return value if isinstance(value, int | float | str | bool) else None


def _role(flag: str) -> str | None:
    name = flag.lstrip("-").lower().replace("-", "_")
    return next((role for role, pattern in _ROLES.items() if re.fullmatch(pattern, name)), None)


def _printed(tree: ast.AST) -> Iterator[PrintedLine]:
    """Each printed or logged line of an f-string with a step, a time or a rate.

    Lines with the number of a step come first, then those in a loop: what is printed once is a summary. Of several,
    those of training come before those of an evaluation and of an epoch, then those with a time or a rate, then those
    with more.
    """
    looped = _looped(tree)
    found: list[tuple[tuple[bool | int, ...], PrintedLine]] = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.JoinedStr):
            continue
        if _name(call.func) not in ("print", "info", "write", "log", "echo", "print_rank_0", "log_dist"):
            continue
        for pieces in _lines(call.args[0]):
            pattern, groups = _pattern(pieces, partial(span_of_several, tree, call))
            if {"step", "step_seconds", "units_per_second"} & groups.keys():
                unit = "ms" if re.match(r"\s*ms\b", groups.get("step_seconds", "")) else "s"
                written, is_timed = _written(pieces), bool({"step_seconds", "units_per_second"} & groups.keys())
                evaluates = _EVALUATION.search(written.lower()) is not None
                per: Timed = "step"
                if "step" not in groups:
                    per = "run" if call not in looped else "epoch" if _is_of_an_epoch(written) else "step"
                order = (
                    "step" not in groups,
                    call not in looped,
                    evaluates,
                    per == "epoch",
                    not is_timed,
                    -len(groups),
                )
                found.append((order, (written, pattern, unit, per)))
    yield from (line for _, line in sorted(found, key=lambda each: each[0]))


def _is_of_an_epoch(written: str) -> bool:
    """Whether a line without the number of a step has that of an epoch, and tells of no steps or batches in it."""
    text = written.lower()
    return bool(re.search(r"\bepoch\W*\{|\{[\w.]*epoch\b", text)) and not re.search(r"step|iter|batch", text)


def _looped(tree: ast.AST) -> set[ast.AST]:
    """All that is in a loop, or in a function that is called in one."""
    loops: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found: set[ast.AST] = set()
    while loops:
        inside = {each for loop in loops for each in ast.walk(loop)}
        called = {_name(each.func) for each in inside if isinstance(each, ast.Call)}
        found |= inside
        loops = [function for function in functions if function.name in called and function not in found]
    return found


def _lines(text: ast.JoinedStr) -> Iterator[list[ast.expr]]:
    """The pieces of each line of an f-string as it is read: without colours, and without the blanks around it."""
    lines: list[list[ast.expr]] = [[]]
    for piece in text.values:
        if not isinstance(piece, ast.Constant):
            lines[-1].append(piece)
            continue
        first, *others = re.split(r"[\r\n]", _COLOURS.sub("", str(piece.value)))
        lines[-1].append(ast.Constant(first))
        lines += [[ast.Constant(each)] for each in others]
    for line in lines:
        for place, cut in ((0, str.lstrip), (-1, str.rstrip)):
            if line and isinstance(end := line[place], ast.Constant):
                line[place : place + 1 or None] = [ast.Constant(kept)] if (kept := cut(str(end.value))) else []
        written = "".join(str(piece.value) for piece in line if isinstance(piece, ast.Constant))
        if not _CONTROL.search(written):  # half a colour, for one, whose number is inserted
            yield line


def _written(pieces: list[ast.expr]) -> str:
    """A line of an f-string as its author wrote it."""
    text = ast.unparse(ast.JoinedStr(pieces)).removeprefix("f")
    quotes = 3 if text[:3] in ('"""', "'''") and len(text) > 5 else 1
    return text[quotes:-quotes][:_MAX_LINE]


def _pattern(pieces: list[ast.expr], is_of_several: Callable[[ast.expr], bool]) -> tuple[str, dict[str, str]]:
    """A pattern for a line of an f-string: what is written stays, what is inserted becomes a group by the word before.

    Returns with it what follows each group. is_of_several: whether a time is not that of a single step.
    """
    parts: list[str] = []
    groups: dict[str, str] = {}
    suffix = ""
    for place, piece in enumerate(pieces):
        if isinstance(piece, ast.Constant):
            written, suffix = str(piece.value).removeprefix(suffix), ""
            parts.append(re.sub(r"(?:\\\s)+", r"\\s+", re.escape(written)))
            continue
        earlier = pieces[place - 1] if place else None
        before = str(earlier.value) if isinstance(earlier, ast.Constant) else ""
        following = pieces[place + 1] if place + 1 < len(pieces) else None
        after = str(following.value) if isinstance(following, ast.Constant) else ""
        group = _meaning(before, after, ast.unparse(piece.value)) if isinstance(piece, ast.FormattedValue) else None
        if group == "step_seconds" and isinstance(piece, ast.FormattedValue) and is_of_several(piece.value):
            group = None
        if group is None or group in groups:
            parts.append(r".*?" if following is not None else r".*")
        else:
            groups[group] = after
            gap = "" if parts and parts[-1].endswith(r"\s+") else r"\s*"
            found = _SUFFIX.match(after)
            suffix = found[0] if found else ""
            number = _LOSS if group == "loss" else _NUMBER
            blanks = r"\s*" if _has_blanks_behind(piece) else ""
            end = blanks if following is not None else ""
            parts.append(
                rf"{gap}(?P<{group}>(?:{number}){blanks}{suffix})" if suffix else rf"{gap}(?P<{group}>{number}){end}"
            )
    return "".join(parts), groups


def _has_blanks_behind(piece: ast.expr) -> bool:
    """Whether a number is printed to the left or in the middle of its field: `{step:<6d}`."""
    spec = piece.format_spec if isinstance(piece, ast.FormattedValue) else None
    return spec is not None and re.match(r".?[<^]", ast.unparse(spec).removeprefix("f")[1:]) is not None


def _meaning(before: str, after: str, expression: str) -> str | None:
    before = re.sub(r"\s", " ", before.lower())
    word = before.rstrip(" :=[(").rpartition(" ")[2]
    unit = after.lower().lstrip(" ")
    if "loss" in word or (not word and "loss" in expression):
        return "loss"
    if _STEP_WORD.fullmatch(word) and "size" not in expression:
        return "step"
    if not re.search(r"\w", word) and _STEP_NAME.fullmatch(expression):
        return "step"
    if _OF_STEPS.search(word):
        return None
    if re.search(r"tok(en)?s?/s|samples?/s|tps|per_?sec", word) or re.match(r"(tok(en)?s?|samples?)/s", unit):
        return "units_per_second"
    if _SINCE_THE_START.search(before) or _OF_SEVERAL.search(before):
        return None
    if re.match(r"m?s\b(?!/)|sec", unit) and re.search(r"time|took|dt|elapsed|iter", word + expression.lower()):
        return "step_seconds"
    return None
