"""Mutation operators: small changes of a module that change its behaviour."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

#: Larger integers are tuning limits (sizes, timeouts): a difference of one has no effect that a test could observe.
INTEGER_MAX = 64
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Calls of logging and metrics, which are not removed: a test of them would test log text.
_REPORTING = {"debug", "info", "warn", "warning", "error", "exception", "observe", "count", "gauge", "time"}
#: Methods that return text for people.
_TEXT_METHODS = {"__repr__", "__str__"}
#: Calls that a correctly typed program never reaches.
_UNREACHABLE = {"assert_never"}


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: str
    line: int
    index: int
    change: str
    #: The text of the line, without its indentation: it identifies the mutant when other lines are added.
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} #{self.index} {self.change}"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its source."""
    lines = source.splitlines()
    return [
        Mutant(path, line, index, change, lines[line - 1].strip())
        for index, (line, change, _) in enumerate(_mutations(ast.parse(source)))
    ]


def mutated(source: str, index: int) -> ast.Module:
    """Return the module's tree with the mutation of that index applied."""
    tree = ast.parse(source)
    for at, (_, _, apply) in enumerate(_mutations(tree)):
        if at == index:
            apply()
            return ast.fix_missing_locations(tree)
    raise IndexError(f"the module has no mutation {index}")


_Mutation = tuple[int, str, Callable[[], None]]


def _mutations(tree: ast.Module) -> Iterator[_Mutation]:
    for parent in ast.walk(tree):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if isinstance(parent, ast.FunctionDef) and parent.name in _TEXT_METHODS:
                continue
            for node in _body(parent):
                yield from _of_node(node)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[ast.AST]:
    """Yield the nodes that run when the function is called, without annotations, f-strings and inner functions."""
    todo: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else [*function.body]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.JoinedStr):
            continue
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and _is_left_out(node)):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            todo[:0] = [part for part in (node.value,) if part is not None]
        else:
            todo[:0] = list(ast.iter_child_nodes(node))


def _of_node(node: ast.AST) -> Iterator[_Mutation]:
    match node:
        case ast.Compare(ops=operators, lineno=line):
            for at, operator in enumerate(operators):
                if (other := _COMPARISONS.get(type(operator))) is not None:
                    ops = [*operators[:at], other(), *operators[at + 1 :]]
                    yield line, f"{_name(operator)} -> {other.__name__}", partial(_set, node, ops=ops)
        case ast.BoolOp(op=ast.And(), lineno=line):
            yield line, "and -> or", lambda: _set(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or(), lineno=line):
            yield line, "or -> and", lambda: _set(node, op=ast.And())
        case ast.BinOp(op=operator, lineno=line) if type(operator) in _ARITHMETIC and not _is_text(node):
            swapped = _ARITHMETIC[type(operator)]
            yield line, f"{_name(operator)} -> {swapped.__name__}", lambda: _set(node, op=swapped())
        case ast.AugAssign(op=operator, lineno=line) if type(operator) in _ARITHMETIC:
            swapped = _ARITHMETIC[type(operator)]
            yield line, f"{_name(operator)}= -> {swapped.__name__}=", lambda: _set(node, op=swapped())
        case ast.If(test=test, lineno=line) | ast.IfExp(test=test, lineno=line) | ast.While(test=test, lineno=line) if (
            not isinstance(test, ast.Compare | ast.Constant)
        ):
            yield line, "condition negated", lambda: _set(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool(value), lineno=line):
            yield line, f"{value} -> {not value}", lambda: _set(node, value=not value)
        case ast.Constant(value=int(number), lineno=line) if abs(number) <= INTEGER_MAX:
            yield line, f"{number} -> {number + 1}", lambda: _set(node, value=number + 1)
        # Every caller treats None like False; constants are mutated separately.
        case ast.Return(value=ast.expr() as value, lineno=line) if not (
            isinstance(value, ast.Constant) and (value.value is None or value.value is False)
        ):
            yield line, "returns None", lambda: _set(node, value=ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await(), lineno=line):
            yield line, "statement removed", lambda: _set(node, value=ast.Constant(None))
        case ast.Call(func=ast.Name(id=name, lineno=line) as function) if name in _CALLS:
            yield line, f"{name} -> {_CALLS[name]}", lambda: _set(function, id=_CALLS[name])
        case _:
            return  # the effects of other nodes are not observable, or their children are mutated


def _set(node: ast.AST, **fields: object) -> None:
    for name, value in fields.items():
        setattr(node, name, value)


def _name(operator: ast.AST) -> str:
    return type(operator).__name__


def _is_text(node: ast.BinOp) -> bool:
    """Return True if the node concatenates strings and one of them is a literal."""
    return any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right))


def _is_left_out(node: ast.Expr) -> bool:
    match node.value:
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _REPORTING
        case ast.Call(func=ast.Name(id=name)):
            return name in _UNREACHABLE
        # A yield to other tasks changes when work is done, but not its result.
        case ast.Await(ast.Call(ast.Attribute(ast.Name("asyncio"), "sleep"), [ast.Constant(0)])):
            return True
        case _:
            return False
