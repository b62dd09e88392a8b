"""The table "Tried as written" of ``docs/from-ejkernel.md``: every row does what it says.

A row has lines in the words of ejKernel's documents, and what they give: a value, or an error and a part of its
message. Only the name of the package in an import line is replaced.
"""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ejkernel_classes
from ejkernel_tuning import clear_invocations

SECTION = (Path(__file__).parents[3] / "docs/from-ejkernel.md").read_text().partition("\n## Tried as written\n")[2]
HEADS = (["written", "gives", "what differs, and why"], ["---"] * 3)
ERROR = re.compile(r"(\w+Error|NoKernel)(: (?P<message>.*))?")


def table_rows() -> list[list[str]]:
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for line in SECTION.splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if row not in HEADS]


def code_of(cell: str) -> str:
    """The code in a cell. Each of its spans is a line."""
    return "\n".join(re.findall(r"`([^`]+)`", cell)).replace("\\|", "|")


ROWS = [(code_of(written), code_of(gives), difference) for written, gives, difference in table_rows()]


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the page's program defines."""
    program = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    assert len(program) == 1
    module = types.ModuleType("tried_as_written")
    sys.modules[module.__name__] = module  # a stored configuration names its class by its module
    exec(program[0], vars(module))
    yield vars(module)
    del sys.modules[module.__name__]


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No row finds what another one has recorded or set."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_TRITON_SMEM_LIMIT", "")  # a row sets it
    clear_invocations()
    yield
    ejkernel_classes.stop_recording()
    clear_invocations()


def value_of(code: str, names: dict[str, Any]) -> Any:
    """The value of the last line, or None where it is a statement."""
    code = code.replace("from ejkernel.", "from ejkernel_classes.")
    *statements, last = ast.parse(code.replace("import ejkernel\n", "import ejkernel_classes as ejkernel\n")).body
    if not isinstance(last, ast.Expr):
        statements.append(last)
    exec(compile(ast.Module(statements, []), "<row>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<row>", "eval"), names) if isinstance(last, ast.Expr) else None


def assert_same(value: Any, expected: Any) -> None:
    if isinstance(value, jax.Array):
        expected = np.asarray(expected)
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    elif isinstance(value, tuple) and any(isinstance(leaf, jax.Array) for leaf in value):
        for leaf, expected_leaf in zip(value, expected, strict=True):
            assert_same(leaf, expected_leaf)
    else:
        assert value == expected


@pytest.mark.parametrize(("written", "gives", "difference"), ROWS, ids=[written for written, *_ in ROWS])
def test_the_row_is_true(written: str, gives: str, difference: str, names: dict[str, Any]) -> None:
    names = dict(names)
    error = ERROR.fullmatch(gives)
    if error is None:
        value = value_of(written, names)
        assert_same(value, eval(gives, names) if gives else None)
        return
    with pytest.raises(Exception) as raised:  # its type and its message are compared below
        value_of(written, names)
    assert type(raised.value).__name__ == gives.partition(":")[0]
    assert (error["message"] or "") in str(raised.value)


def test_the_table_has_about_a_hundred_rows_and_says_what_differs() -> None:
    assert len(ROWS) >= 100
    assert len({written for written, *_ in ROWS}) == len(ROWS)
    documented_errors = {"ValueError: algorithm: takes one of hashlib's", "AssertionError"}
    for written, gives, difference in ROWS:
        is_error = ERROR.fullmatch(gives) is not None
        assert difference or not is_error or gives in documented_errors or "SMEM" in gives, written
