"""The fenced blocks of a page, for all tests that run or compare them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """The line on which the content begins, the language, and the content."""

    line: int
    language: str
    content: str

    @property
    def file(self) -> str | None:
        """The name of the file that a block of code has in its first line, as a comment."""
        match = re.match(r"# ([\w./]+\.(?:py|toml))\n", self.content)
        return match and match[1]

    @property
    def text_of_file(self) -> str:
        """The content without that line."""
        return self.content.partition("\n")[2]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(text.count("\n", 0, match.start()) + 2, match[1], match[2]) for match in FENCE.finditer(text)]


def functions_of(page: Path) -> dict[str, Any]:
    """The functions of a page, with its imports and their constants."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        if block.language == "python":
            body = [node for node in ast.parse(block.content).body if is_definition(node)]
            exec(compile(ast.Module(body, []), str(page), "exec"), names)
    return names


def is_definition(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OPTIONS"
    return is_constant or isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom))
