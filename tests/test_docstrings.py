"""Lines of code in the docstrings of modules call what there is, with the arguments that it takes."""

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "engine", "flows", "reports", "slurm", "tasks")
OF_OTHERS = {"FileSystemWriter", "Path", "ShareMemCommBuilder", "TrainingArguments", "partial"}
"""Of Python and of libraries, which the modules import where they use them, or not at all."""
OF_THE_CALLER = {"measure", "model", "rule", "something", "step"}
"""What a caller has of its own, and a word of prose before parentheses (`rule`)."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the packages by its path."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


@functools.cache
def defined_anywhere() -> set[str]:
    """Functions and classes at the top of any module."""
    return {node.name for tree in trees().values() for node in tree.body if isinstance(node, Function | ast.ClassDef)}


def examples(docstring: str) -> Iterator[ast.AST]:
    """The lines that can be read as code."""
    for line in docstring.splitlines():
        code = line.split("#")[0].strip()
        code += " pass" if code.endswith(":") else ""
        try:
            yield ast.parse(code)
        except SyntaxError:
            continue


def problem(function: Function, call: ast.Call, is_method: bool) -> str:
    """What is wrong with the arguments of a call; empty: nothing, or they are left out by `...` or stars."""
    left_out = any(isinstance(each, ast.Constant) and each.value is ... for each in call.args)
    if left_out or any(isinstance(each, ast.Starred) for each in call.args) or None in _keywords(call):
        return ""
    taken = function.args
    names = [each.arg for each in (*taken.posonlyargs, *taken.args)][1 if is_method else 0 :]
    named = [each.arg for each in taken.kwonlyargs]
    if len(call.args) > len(names) and not taken.vararg:
        return "too many arguments"
    if taken.kwarg is None and (unknown := [each for each in _keywords(call) if each not in (*names, *named)]):
        return f"no argument {unknown[0]}"
    required = names[: len(names) - len(taken.defaults)][len(call.args) :]
    required += [name for name, default in zip(named, taken.kw_defaults, strict=True) if default is None]
    missing = [name for name in required if name not in _keywords(call)]
    return f"without {', '.join(missing)}" if missing else ""


def _keywords(call: ast.Call) -> list[str | None]:
    return [each.arg for each in call.keywords]


def wrong_calls(tree: ast.Module) -> Iterator[str]:
    """Calls in a module's docstring of what there is not, or with other arguments than it takes."""
    lines = list(examples(ast.get_docstring(tree) or ""))
    own = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    nodes = [node for line in lines for node in ast.walk(line)]
    known = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {name for node in (*nodes, *ast.walk(tree)) for name in _imported(node)}
    known |= {*own, *dir(builtins), *OF_OTHERS, *OF_THE_CALLER} | defined_anywhere()
    for call in (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in known:
            yield f"{ast.unparse(call)}: there is no {name}"
        found = own.get(name)
        method = isinstance(found, ast.ClassDef)
        if isinstance(found, ast.ClassDef):
            found = next((one for one in found.body if isinstance(one, Function) and one.name == "__init__"), None)
        if isinstance(found, Function) and (what := problem(found, call, method)):
            yield f"{ast.unparse(call)}: {what}"


def _imported(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    return {(each.asname or each.name).split(".")[0] for each in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_in_docstrings_of_modules_call_what_there_is(package: str) -> None:
    """They showed names that had been changed since, and calls without arguments that had been added."""
    wrong = {path: list(wrong_calls(tree)) for path, tree in trees().items() if path.startswith(f"{package}/")}
    assert {path: found for path, found in wrong.items() if found} == {}


def test_wrong_calls_are_found() -> None:
    code = '"""Example.\n\n    gone(1)\n    kept(1)\n    kept(1, 2, c=3)\n    kept(...)\n"""\ndef kept(a, b): ...\n'
    assert list(wrong_calls(ast.parse(code))) == [
        "gone(1): there is no gone", "kept(1): without b", "kept(1, 2, c=3): no argument c"
    ]  # fmt: skip
