"""Arguments of transformers.HfArgumentParser: fields of dataclasses.

found = HfArguments(tree)
found.trains            # TrainingArguments, or a class derived from it, is among them
found.required          # ["--model_name_or_path"]: fields without a default
"""

import ast
import re

_PARSERS = ("HfArgumentParser", "TrlParser")
_TRAINING = re.compile(r"\w*TrainingArguments|(SFT|DPO|GRPO|RLOO|KTO|ORPO|CPO|BCO|GKD|XPO|PRM|Reward|OnlineDPO)Config")
"""TrainingArguments, and what transformers and TRL derive from it."""


class HfArguments:
    """What a script's HfArgumentParser takes; nothing where it has none."""

    def __init__(self, tree: ast.AST) -> None:
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        given = [
            _name(each)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and _name(call.func) in _PARSERS
            for argument in [*call.args, *(each.value for each in call.keywords)]
            for each in ast.walk(argument)
        ]
        self.trains = False
        self.required: list[str] = []
        seen: set[str] = set()
        while given:
            name = given.pop(0)
            if name in seen:
                continue
            seen.add(name)
            if name in classes:
                self.required += [f"--{field}" for field in _without_default(classes[name])]
                given += [_name(base) for base in classes[name].bases]
            elif _TRAINING.fullmatch(name):
                self.trains = True
            elif name.islower():  # a variable that holds them
                given += [found for node in ast.walk(tree) if _TRAINING.fullmatch(found := _name(node))]


def _without_default(node: ast.ClassDef) -> list[str]:
    """Names of the fields of a dataclass that have no default."""
    found = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = field.value
            names = [each.arg for each in value.keywords] if isinstance(value, ast.Call) else []
            is_field = isinstance(value, ast.Call) and _name(value.func) == "field"
            if "ClassVar" not in ast.unparse(field.annotation) and (
                value is None or (is_field and not {"default", "default_factory"} & set(names) and "init" not in names)
            ):
                found.append(field.target.id)
    return found


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))
