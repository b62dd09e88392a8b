"""The page of the command shows what the command prints, and its subcommand works."""

from __future__ import annotations

import doctest
import itertools
from pathlib import Path

import pytest

from tests.pages import Block, blocks

PAGE = Path(__file__).parents[3] / "docs/command.md"
BLOCKS = blocks(PAGE)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def is_command(block: Block, following: Block) -> bool:
    return (block.language, following.language) == ("shell", "text")


def commands() -> list[tuple[list[str], str]]:
    """The words of each command on the page, with the output that is shown after it."""
    return [(a.content.split()[1:], b.content) for a, b in itertools.pairwise(BLOCKS) if is_command(a, b)]


def test_the_page_has_every_command_of_this_package():
    assert [words[0] for words, _ in commands()] == ["list", "list", "doctor", "explain", "explain", "new"]


@pytest.mark.parametrize("words", [words for words, _ in commands() if words[0] == "new" or "6x64" in " ".join(words)])
def test_a_command_prints_what_the_page_shows(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    process = run(*words)
    (expected,) = [output for other, output in commands() if other == words]
    assert doctest.OutputChecker().check_output(expected, process.stdout or process.stderr, OPTIONS)


@pytest.mark.parametrize("words", [["list"], ["list", "--here"]])
def test_the_tables_of_the_page_are_those_of_the_command(run, words):
    """The rows that the page has, but for those of the device and of the page's own machine."""
    (expected,) = [output for other, output in commands() if other == words]
    rows = {" ".join(line.split()) for line in run(*words).stdout.splitlines()}
    shown = [" ".join(line.split()) for line in expected.splitlines() if line.strip(" ─.") and "cores" not in line]
    assert [row for row in shown if row not in rows] == []


def test_the_subcommand_of_the_page_is_what_new_makes(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("new", "my-sizes", "--kind", "command").returncode == 0
    (source,) = [block for block in BLOCKS if block.language == "python"]
    assert source.text_of_file == Path("my-sizes", source.file).read_text()
    (points,) = [block.content for block in BLOCKS if block.language == "toml"]
    assert points in Path("my-sizes/pyproject.toml").read_text()


def test_the_subcommand_of_the_page_runs(run, install):
    (source,) = [block.text_of_file for block in BLOCKS if block.language == "python"]
    path = install("my-package", {"command_of_page": source}, commands={"my-sizes": "command_of_page:command"})
    process = run("my-sizes", "rms_norm", "--shape", "3x8", "--dtype", "float32", path=path)
    assert process.stdout.splitlines()[-2:] == ["x       (3, 8)   96", "96 bytes"]
    assert "Show how large the arrays of a call are" in run("--help", path=path).stdout
    assert '"x": 96' in run("my-sizes", "rms_norm", "--shape", "3x8", "--dtype", "float32", "--json", path=path).stdout
