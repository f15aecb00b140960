"""Whether a time that a script prints is that of one step, by where its clock was started.

    span_of_several(tree, call, expression)         # True: of all steps since the start, or since the last line

for step in steps:                                  # started = time.time() before the loop: a time since the start
    if step % 10 == 0:
        print(f"time {time.time() - started}")      # started = time.time() here: the time of ten steps
"""

import ast

_CLOCKS = ("time", "perf_counter", "monotonic")
_FACTORS = (1000, 1e6)
_OF_RANKS = ("rank", "master", "main")


def span_of_several(tree: ast.AST, call: ast.Call, expression: ast.expr) -> bool:
    """Whether what is printed by the call, in a loop, is the difference of a clock that not each step starts."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and call in ast.walk(node)]
    begin = _begin(tree, expression)
    if not loops or begin is None or not _stores(tree, begin):
        return False
    loop = max(loops, key=lambda node: node.lineno)
    conditional = {
        each
        for branch in ast.walk(loop)
        if isinstance(branch, ast.If) and not any(word in ast.unparse(branch.test).lower() for word in _OF_RANKS)
        for each in ast.walk(branch)
    }
    return not any(node not in conditional for node in _stores(loop, begin))


def _begin(tree: ast.AST, expression: ast.expr) -> str | None:
    """Name of the time from which on an expression, or the variable that it names, counts; None for any other."""
    if isinstance(expression, ast.Name):
        found = {_begin_of(tree, value) for value in _values(tree, expression.id)}
        return found.pop() if len(found) == 1 else None
    return _begin_of(tree, expression)


def _begin_of(tree: ast.AST, expression: ast.expr) -> str | None:
    if not isinstance(expression, ast.BinOp):
        return None
    left, right = expression.left, expression.right
    if isinstance(expression.op, ast.Mult):
        for factor, other in ((left, right), (right, left)):
            if isinstance(factor, ast.Constant) and factor.value in _FACTORS:
                return _begin_of(tree, other)
    if isinstance(expression.op, ast.Sub) and isinstance(right, ast.Name) and _is_clock(tree, left):
        return right.id
    return None


def _is_clock(tree: ast.AST, expression: ast.expr) -> bool:
    """Whether it is the time now, or a variable that was given it."""
    if isinstance(expression, ast.Name):
        given = _values(tree, expression.id)
        return bool(given) and all(isinstance(value, ast.Call) and _is_clock(tree, value) for value in given)
    function = getattr(expression, "func", None)
    return getattr(function, "attr", getattr(function, "id", "")) in _CLOCKS


def _values(tree: ast.AST, name: str) -> list[ast.expr]:
    """What a variable is set to, anywhere."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return [
        node.value for node in assigned if any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    ]


def _stores(inside: ast.AST, name: str) -> list[ast.AST]:
    """Where a variable is set."""
    return [
        node
        for node in ast.walk(inside)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
