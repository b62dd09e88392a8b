"""The group of all subcommands, and what happens to their errors."""

from __future__ import annotations

import ast
import difflib
import errno
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from ._metadata import COMMANDS, entry_points, provider

#: The exit code of a program that was interrupted, as shells have it.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 1 where it failed, 2 where it was used wrongly."""
    words = _debug_first(sys.argv[1:] if arguments is None else list(arguments))
    try:
        code = ejkernel.main(words, prog_name="ejkernel", standalone_mode=False)
        sys.stdout.flush()  # a closed pipe and a full disk show here, where they can be handled
    except click.exceptions.NoArgsIsHelpError as help_text:
        click.echo(help_text.format_message())
        sys.exit(0)
    except click.UsageError as error:
        place = error.ctx.command_path if error.ctx else "ejkernel"
        sys.exit(_fail(f"{error.format_message()} ('{place} --help' describes it)", 2))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(0)
    except click.ClickException as error:
        sys.exit(_fail(error.format_message(), error.exit_code))
    except Exception as error:
        if "--debug" in words:
            raise
        sys.exit(_fail(f"{_text(error)} (--debug shows where)", 1))
    sys.exit(code if isinstance(code, int) else 0)


def _debug_first(words: Sequence[str]) -> list[str]:
    """The words with ``--debug``, which may be anywhere before ``--``, at the front, where the group reads it."""
    end = words.index("--") if "--" in words else len(words)
    if "--debug" not in words[:end]:
        return list(words)
    return ["--debug", *(word for word in words[:end] if word != "--debug"), *words[end:]]


def _drop_output() -> None:
    """Have nowhere to write what is left of the output, or Python complains about it while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(error: Exception) -> str:
    """The error in one line. The type says something where it is not one of those for wrong arguments."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"the output cannot be written: {error.strerror}; write it to a place with space"
    text = " ".join(str(error).split()) or "no message"
    is_clear = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("ejkernel_")
    return text if is_clear else f"{type(error).__name__}: {text}"


def _fail(text: str, code: int) -> int:
    """Show an error in one line, and return the exit code."""
    click.echo(f"ejkernel: {' '.join(text.split())}", err=True)
    try:
        sys.stdout.flush()
    except OSError:  # what was to be written is what failed
        _drop_output()
    return code


class Commands(click.Group):
    """The subcommands that are installed, which are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({point.name for point in entry_points(COMMANDS)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        points = [point for point in entry_points(COMMANDS) if point.name == name]
        if not points:
            return None
        if len(points) > 1:
            owners = " and ".join(f"{provider(point)} ({point.value})" for point in points)
            raise click.ClickException(f"{name!r} is claimed by {owners}; uninstall one")
        try:
            command = points[0].load()
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(
                f"{name!r} of {provider(points[0])} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(command, click.Command):
            kind = type(command).__name__
            raise click.ClickException(
                f"{name!r} of {provider(points[0])}: {points[0].value} is no command, but a {kind}"
            )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            similar = difflib.get_close_matches(args[0], names, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; there are {', '.join(names)}"
            raise click.UsageError(f"no command is called {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {point.name: summary(point.value) for point in entry_points(COMMANDS)}
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(sorted(rows.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        rows = {point.name: summary(point.value) for point in entry_points(COMMANDS)}
        names = [name for name in sorted(rows) if name.startswith(incomplete)]
        return [
            *(CompletionItem(name, help=rows[name]) for name in names),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]


def summary(value: str) -> str:
    """The first line of the docstring of an entry point's module, without importing it; "" where it has none."""
    module, _, _ = value.partition(":")
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)  # of a module at the top level: nothing is imported
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    folders = spec.submodule_search_locations
    file = Path(spec.origin or "") if not rest or not folders else Path(folders[0], *rest).with_suffix(".py")
    if not file.is_file():
        file = file.with_suffix("") / "__init__.py"
    try:
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
    except (OSError, SyntaxError, ValueError):
        return ""
    return text.partition("\n")[0].rstrip(".")


@click.command(cls=Commands, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(metadata.version("ejkernel-cli"), prog_name="ejkernel")
def ejkernel(debug: bool) -> None:
    """Kernels for JAX: what is installed, which kernel a call runs, and how fast it is.

    Every subcommand has its own --help.
    """
