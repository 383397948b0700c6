"""Mutants of one file: small edits of its text, found in its syntax tree.

Left out is what no test should look at: docstrings, annotations, decorators, asserts, ``__repr__`` and ``__str__``,
what an error says, log lines, texts for people (strings with a blank), the values of named constants, what only type
checkers run, ``self._check()``, which has nothing but asserts, and the points at which crash tests kill.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
}
BETWEEN = re.compile(r"([\s)]*)[^\s()#]+(?: [a-z]+)?([\s(]*)")
NEGATED_ALREADY = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
LOGS = {"debug", "info", "warning", "error", "exception", "critical"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replaces ``start`` to ``end`` of a file, in bytes, by ``text``."""

    file: str
    start: int
    end: int
    text: str
    lines: tuple[int, int]
    """First and last line of the statement that changes, whose tests are run."""
    is_in_function: bool
    """Whether only the code of a function changes, not what the module or a class does when it is made."""

    def applied(self, source: str) -> str:
        """Return the mutated source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        """Return the change as a unified diff without context."""
        found = difflib.unified_diff(source.splitlines(), self.applied(source).splitlines(), lineterm="", n=0)
        return "\n".join(f"    {line}" for line in list(found)[3:])


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return all mutants of the text ``source`` of ``file``, in its order."""
    found = _Finder(file, source)
    found.body(ast.parse(source).body)
    return sorted(dict.fromkeys(found.mutants), key=lambda mutant: (mutant.start, mutant.end, mutant.text))


class _Finder:
    """Walks through statements; ``_expression`` through what is in them."""

    def __init__(self, file: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._file = file
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._source = source
        self._function: Function | None = None
        self._lines = (0, 0)

    def body(self, statements: list[ast.stmt]) -> None:
        """Find mutants in statements behind each other."""
        for statement in statements:
            inner = [getattr(statement, name, None) for name in ("body", "cases", "handlers")]
            first = next((part[0] for part in inner if part), None)
            last = statement.end_lineno or statement.lineno
            if first is not None:
                last = max(statement.lineno, getattr(first, "lineno", getattr(first, "pattern", statement).lineno) - 1)
            self._lines = (statement.lineno, last)
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(statement)
            case ast.ClassDef():
                self.body(statement.body)
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
                pass
            case ast.If() if "TYPE_CHECKING" in ast.unparse(statement.test):
                self.body(statement.orelse)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr():
                self._remove(statement)
                if not (_is_log(statement.value) or _is_of_tests(statement.value)):
                    self._expression(statement.value)
            case ast.Raise():
                self._remove(statement)
            case ast.Return():
                self._return(statement)
            case ast.Continue():
                self._edit(statement, "break")
            case ast.Break():
                self._edit(statement, "continue")
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                self._assign(statement)
            case ast.If() | ast.While():
                self._condition(statement.test)
                self.body(statement.body)
                self.body(statement.orelse)
            case ast.Match():
                self._expression(statement.subject)
                for case in statement.cases:
                    self._lines = (case.pattern.lineno, case.pattern.lineno)
                    if case.guard is not None:
                        self._condition(case.guard)
                    self.body(case.body)
            case _:
                self._compound(statement)

    def _compound(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            self._remove(statement)
        for _, value in ast.iter_fields(statement):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.expr | ast.withitem):
                    self._expression(part)
                elif isinstance(part, ast.ExceptHandler):
                    self.body(part.body)
                elif isinstance(part, ast.stmt):
                    self.body([part])

    def _define(self, function: Function) -> None:
        for default in (*function.args.defaults, *function.args.kw_defaults):
            if default is not None:
                self._lines = (function.body[0].lineno, function.body[-1].end_lineno or 0)
                self._expression(default)
        if function.name in ("__repr__", "__str__"):
            return
        outer, self._function = self._function, function
        self.body(function.body)
        self._function = outer

    def _return(self, statement: ast.Return) -> None:
        value, function = statement.value, self._function
        if value is None or function is None:
            return
        self._expression(value)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, bool)):
            return
        is_bool = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
        if is_bool and not _is_negated_already(value):
            self._edit(value, f"not ({ast.get_source_segment(self._source, value)})")
        elif not is_bool:
            self._edit(value, "None")

    def _assign(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        is_name = isinstance(targets[0], ast.Name)
        if isinstance(statement, ast.AnnAssign) and "TypeAlias" in ast.unparse(statement.annotation):
            return
        if isinstance(targets[0], ast.Name) and (
            targets[0].id.startswith("__") or (targets[0].id.lstrip("_").isupper() and _is_plain(statement.value))
        ):
            return  # __all__; a limit or a name: a choice, and no logic
        if isinstance(statement, ast.AugAssign):
            self._swap(statement.op, statement.target, statement.value, "=")
        is_making = self._function is None or self._function.name in ("__init__", "__post_init__")
        if not is_name and not is_making and statement.value is not None:
            self._remove(statement)
        if statement.value is not None:
            self._expression(statement.value)

    def _condition(self, test: ast.expr) -> None:
        if not _is_negated_already(test) and not isinstance(test, ast.Constant):
            self._edit(test, f"not ({ast.get_source_segment(self._source, test)})")
        self._expression(test)

    def _expression(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                for operator, before, after in zip(
                    node.ops, (node.left, *node.comparators), node.comparators, strict=False
                ):
                    self._between(before, after, COMPARED[type(operator)])
            case ast.BoolOp():
                for before, after in zip(node.values, node.values[1:], strict=False):
                    self._between(before, after, "or" if isinstance(node.op, ast.And) else "and")
            case ast.BinOp() if self._function is not None or not isinstance(node.op, ast.BitOr):
                self._swap(node.op, node.left, node.right)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                self._edit(node, f"({ast.get_source_segment(self._source, node.operand)})")
                if isinstance(node.operand, ast.Constant):
                    return
            case ast.Constant():
                self._constant(node)
            case ast.JoinedStr():
                return
            case ast.Call() if self._function is None or _is_log(node):
                return  # of a module: NewType, TypeVar, field()
            case ast.Call(func=ast.Name(id="cast" | "isinstance" | "TypeVar")):
                return
            case ast.IfExp():
                self._condition(node.test)
                self._expression(node.body)
                self._expression(node.orelse)
                return
            case ast.keyword(arg="strict"):
                return  # of zip: an assert
            case ast.comprehension():
                self._expression(node.iter)
                for test in node.ifs:
                    self._condition(test)
                return
        for child in ast.iter_child_nodes(node):
            self._expression(child)

    def _constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool():
                self._edit(node, str(not node.value))
            case int() | float():
                self._edit(node, f"({node.value} + 1)")
            case str() if node.value and " " not in node.value:
                self._edit(node, repr(node.value + "_"))

    def _swap(self, operator: ast.operator, before: ast.expr, after: ast.expr, suffix: str = "") -> None:
        if type(operator) in COMPUTED:
            self._between(before, after, COMPUTED[type(operator)] + suffix)

    def _between(self, before: ast.expr, after: ast.expr, text: str) -> None:
        """Replace the operator between two operands, and leave parentheses around it."""
        start, end = self._span(before)[1], self._span(after)[0]
        old = BETWEEN.fullmatch(self._source.encode()[start:end].decode())
        if old is not None:
            self._add(start, end, f"{old[1]}{text}{old[2]}")

    def _remove(self, statement: ast.stmt) -> None:
        if not (isinstance(statement, ast.Expr) and _is_left_alone(statement.value)):
            self._edit(statement, "pass")

    def _edit(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._add(*self._span(node), text)

    def _add(self, start: int, end: int, text: str) -> None:
        is_in_function = self._function is not None
        self.mutants.append(Mutant(self._file, start, end, text, self._lines, is_in_function))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None, "a node of parsed text has an end"
        assert node.end_col_offset is not None, "a node of parsed text has an end"
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_negated_already(test: ast.expr) -> bool:
    """Whether another mutant of ``test`` is its negation."""
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not)
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], NEGATED_ALREADY)


def _is_plain(value: ast.expr | None) -> bool:
    """Whether ``value`` is written out, or computed of what is."""
    return value is None or all(
        isinstance(node, ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.operator | ast.unaryop | ast.Load)
        for node in ast.walk(value)
    )


def _is_log(value: ast.expr) -> bool:
    """Whether ``value`` writes a line to a log, or warns."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return False
    return value.func.attr in ("warn",) or (value.func.attr in LOGS and "log" in ast.unparse(value.func.value).lower())


def _is_left_alone(value: ast.expr) -> bool:
    """Whether a statement of nothing but ``value`` waits for a mutant of its own, logs, or asserts."""
    return _is_log(value) or isinstance(value, ast.Yield | ast.YieldFrom) or _is_of_tests(value)


def _is_of_tests(value: ast.expr) -> bool:
    """Whether ``value`` has nothing but asserts, or is a point at which crash tests kill."""
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return called in ("assert_never", "self._check", "_check") or called.startswith("fault_points.")
