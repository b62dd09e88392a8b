"""Print the script by which a shell completes subcommands, options and names of operations."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ._output import Failure, print_line

#: Where each shell reads it.
FILES = {
    "bash": 'eval "$(ejkernel completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(ejkernel completion zsh)" in ~/.zshrc',
    "fish": "ejkernel completion fish > ~/.config/fish/completions/ejkernel.fish",
}


@click.command("completion", epilog="\b\n" + "\n".join(FILES.values()))
@click.argument("shell", type=click.Choice([*FILES]))
def command(shell: str) -> None:
    """Print the script by which SHELL completes this command."""
    completion = get_completion_class(shell)
    assert completion is not None
    root = click.get_current_context().find_root().command
    try:
        print_line(completion(root, {}, "ejkernel", "_EJKERNEL_COMPLETE").source())
    except RuntimeError as error:  # a bash that is too old
        raise Failure(str(error)) from error
