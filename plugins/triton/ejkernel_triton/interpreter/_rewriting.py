"""Kernels as Python functions: their source, rewritten to call the operations that Triton's compiler would compile.

In a kernel, Python's syntax has other meanings: a number that is assigned becomes a tensor, ``and`` is a bitwise
operation, and a builtin function of the language gets the compiler as an argument. The rewritten function calls the
functions of `_language` for this. Neither Triton nor the kernel's module changes, so that several threads can run
kernels at the same time, while others compile the same functions for a GPU.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Mapping
from typing import Any

#: The prefix of the names that the rewriting adds.
MARK = "__interpreted_"
_FACTORY = f"{MARK}factory"
#: Python 3.11 counts the depth of a tree for all threads together, and raises if several threads parse.
_PARSING = threading.RLock()


def rewritten(kernel: Any, helpers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The Python function that does the same as a ``triton.jit`` function, by calls of the helpers.

    ``helpers``: callable, method, layout, plain, truth, negation, logical, assigned, constant, asserted.
    """
    with _PARSING:
        return _rewritten(kernel, helpers)


def _rewritten(kernel: Any, helpers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    function = kernel.fn
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef), f"{function.__name__}: a kernel is a function"
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    definition = _Rewriter().function(definition, constants)

    # A factory gives it its free variables. Its globals are those of its module.
    free = {} if function.__closure__ is None else _closure(function)
    arguments = {**{MARK + name: helper for name, helper in helpers.items()}, **free}
    module = ast.parse(f"def {_FACTORY}({', '.join(arguments)}):\n    return {definition.name}")
    factory = module.body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body.insert(0, definition)
    ast.fix_missing_locations(module)
    ast.increment_lineno(definition, first - 1)
    namespace: dict[str, Any] = {}
    exec(compile(module, inspect.getsourcefile(function) or "<kernel>", "exec"), function.__globals__, namespace)
    rewritten_function: Any = namespace[_FACTORY](**arguments)
    rewritten_function.__defaults__, rewritten_function.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    rewritten_function.__qualname__, rewritten_function.__module__ = function.__qualname__, function.__module__
    return rewritten_function  # type: ignore[no-any-return]


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The free variables that have values."""
    free: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            free[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return free


class _Rewriter(ast.NodeTransformer):
    def function(self, node: ast.FunctionDef, constants: list[str]) -> ast.FunctionDef:
        node.decorator_list, node.returns = [], None
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        # The function has the values of the defaults.
        arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
        node.body = [
            ast.Assign([ast.Name(name, ast.Store())], _call("constant", ast.Constant(name), _load(name)))
            for name in constants
        ] + [self.visit(statement) for statement in node.body]
        return ast.fix_missing_locations(node)

    # -- statements ----------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        raise SyntaxError(f"line {node.lineno}: a function inside a kernel, which Triton does not compile")

    def visit_Break(self, node: ast.Break) -> Any:
        raise SyntaxError(f"line {node.lineno}: leaves a loop early, which Triton does not compile")

    def visit_Continue(self, node: ast.Continue) -> Any:
        raise SyntaxError(f"line {node.lineno}: skips the rest of a loop, which Triton does not compile")

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        node.value = _located(_call("assigned", node.value), node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return self.visit(_located(ast.Assign([node.target], _located(value, node)), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        value = self.visit(node.value)
        if "constexpr" in ast.unparse(node.annotation):
            value = _call("constant", ast.Constant(node.target.id), value)
        else:
            value = _call("assigned", value)
        return _located(ast.Assign([node.target], _located(value, node)), node)

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is not None:
            node.value = _located(_call("assigned", node.value), node)
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        message = [] if node.msg is None else [node.msg]
        return _located(ast.Expr(_call("asserted", node.test, *message)), node)

    def visit_If(self, node: ast.If) -> Any:
        return self._tested(node)

    def visit_While(self, node: ast.While) -> Any:
        return self._tested(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._tested(node)

    def _tested(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = _located(_call("truth", node.test), node.test)
        return node

    # -- expressions ---------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute):
            node.func = _located(_call("method", function.value, ast.Constant(function.attr)), function)
        else:
            node.func = _located(_call("callable", function), function)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        return _located(_call("layout", node.value), node) if node.attr == "layout" else node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        node.left, node.right = _plain(node.left), _plain(node.right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return _located(_call("negation", node.operand), node)
        node.operand = _plain(node.operand)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        return self._logical("and" if isinstance(node.op, ast.And) else "or", node.values, node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        sides = [_plain(side) for side in (node.left, *node.comparators)]
        pairs = [
            _located(ast.Compare(left, [op], [right]), node)
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False)
        ]
        return pairs[0] if len(pairs) == 1 else self._logical("and", pairs, node)

    def _logical(self, word: str, values: list[Any], node: ast.expr) -> Any:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        later = [_located(ast.Lambda(nothing, value), value) for value in values]
        return _located(_call("logical", ast.Constant(word), *later), node)


def _plain(node: Any) -> Any:
    """The operand without Triton's wrapper of constants, which does not accept a tensor as the right operand."""
    return node if isinstance(node, (ast.Constant, ast.BinOp)) else _located(_call("plain", node), node)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_load(MARK + name), list(arguments), [])


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _located(node: Any, like: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(node, like))
