"""The command ``ejkernel`` in this process."""

from __future__ import annotations

import pytest

from ejkernel_cli import main


@pytest.fixture
def ejkernel(capsys):
    """Runs the command with these words: the exit code, and what it prints to both streams."""

    def run(*words):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run
