"""Subcommands of a script (`train.py train --lr 0.1`), of argparse's subparsers and click's groups.

found = Subcommands(tree)
found.names, found.chosen           # ("train", "evaluate"), "train"
found.owner(call)                   # whose option a call of add_argument declares; OF_ALL: of the script itself
"""

import ast
import re

OF_ALL = ""
UNKNOWN = "?"
"""Of an option that may be of each subcommand: declared by a function, or by a parent."""
_MEASURED = re.compile(r"train|tune|fit|run|bench|generat|infer|serv")


class Subcommands:
    """The subcommands of a script; names is empty where it has none."""

    def __init__(self, tree: ast.AST) -> None:
        self._parsers: dict[str, list[tuple[int, str]]] = {}
        self._of_click: dict[ast.AST, str] = {}
        names: list[str] = []
        assigned = [
            node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        ]
        for node in sorted(assigned, key=lambda each: each.lineno):
            owner = self._parser(node.value)
            if owner is not None:
                for target in node.targets:
                    self._parsers.setdefault(ast.unparse(target), []).append((node.lineno, owner))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _name(call.func) == "add_parser" and (text := _first_text(call)):
                names.append(text)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                name = _command_of_click(function)
                names += [name] if name else []
                for decorator in function.decorator_list:
                    self._of_click[decorator] = name or OF_ALL
        self.names = tuple(dict.fromkeys(names))
        self.chosen = next((name for name in self.names if _MEASURED.search(name)), next(iter(self.names), None))

    def _parser(self, value: ast.expr) -> str | None:
        """Whose options are declared at what a call returns; None where it returns no parser or group of one."""
        if not isinstance(value, ast.Call):
            return None
        name = _name(value.func)
        if name == "ArgumentParser":
            is_parent = any(each.arg == "add_help" for each in value.keywords)
            return UNKNOWN if is_parent else OF_ALL
        if name == "add_parser":
            return _first_text(value)
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return self._at(value)
        return None

    def _at(self, call: ast.Call) -> str:
        base = call.func.value if isinstance(call.func, ast.Attribute) else None
        known = self._parsers.get(ast.unparse(base), []) if base is not None else []
        return next((owner for line, owner in reversed(known) if line <= call.lineno), UNKNOWN)

    def owner(self, call: ast.Call) -> str:
        """The subcommand whose option or argument a call declares; OF_ALL or UNKNOWN otherwise."""
        if not self.names:
            return OF_ALL
        return self._of_click[call] if call in self._of_click else self._at(call)

    def is_measured(self, call: ast.Call) -> bool:
        """Whether a call declares something of the script itself or of the chosen subcommand."""
        return self.owner(call) in (OF_ALL, self.chosen)


def _command_of_click(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The name of a function that is a command of a group of click; None of click.command, which has no name."""
    for decorator in function.decorator_list:
        made = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(made, ast.Attribute) and made.attr == "command" and ast.unparse(made.value) != "click":
            given = _first_text(decorator) if isinstance(decorator, ast.Call) else None
            return given or function.name.replace("_", "-")
    return None


def _first_text(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))
