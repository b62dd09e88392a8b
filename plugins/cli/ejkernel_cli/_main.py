"""The group of all subcommands, and what happens to their errors."""

from __future__ import annotations

import ast
import contextlib
import difflib
import errno
import importlib.util
import os
import select
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import click

from ._metadata import COMMANDS, entry_points, provider
from ._output import print_error

#: The exit code of a program that was interrupted, as shells have it.
INTERRUPTED = 130
#: By distributions of the project: their subcommands, so that one that is not installed can be named.
ELSEWHERE = {
    "ejkernel-bench": ("bench", "records", "run"),
    "ejkernel-cache": ("cache",),
    "ejkernel-pallas-tpu": ("tpu",),
    "ejkernel-triton": ("triton",),
    "ejkernel-tuning": ("tune",),
}


class _ClosedPipe(Exception):
    """A ``BrokenPipeError`` that click does not see: it would end the command with 1."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 1 where it failed, 2 where it was used wrongly. A closed pipe is not a failure."""
    words = _debug_first(sys.argv[1:] if arguments is None else list(arguments))
    _open_closed_streams()
    try:
        code = _run(words)
        sys.stdout.flush()  # a closed pipe and a full disk show here, where they can be handled
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, (_ClosedPipe, BrokenPipeError)) and _is_output_closed():
            for stream in (sys.stdout, sys.stderr):
                _drop(stream)
            sys.exit(0)
        if "--debug" in words and not isinstance(error, click.ClickException):
            raise
        code = _fail(error)
    sys.exit(code)


def _run(words: list[str]) -> int:
    """Run a subcommand, and return its exit code."""
    try:
        with warnings.catch_warnings():
            if "--debug" not in words:
                warnings.showwarning = _show_warning
            code = ejkernel.main(words, prog_name="ejkernel", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as help_text:
        click.echo(help_text.format_message())
        return 0
    return code if isinstance(code, int) else 0


def _debug_first(words: Sequence[str]) -> list[str]:
    """The words with ``--debug``, which may be anywhere before ``--``, at the front, where the group reads it."""
    end = words.index("--") if "--" in words else len(words)
    if "--debug" not in words[:end]:
        return list(words)
    return ["--debug", *(word for word in words[:end] if word != "--debug"), *words[end:]]


def _open_closed_streams() -> None:
    """Have nothing to read, and nowhere to write, where the caller has closed a stream, as ``>&-`` does.

    Otherwise ``sys.stdout`` is None, and the next file that is opened gets its number: what a library writes to the
    error stream would be in a record.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (it is open until the end)


def _is_output_closed() -> bool:
    """Whether nobody reads the output any more. A pipe to another process may be broken, too, and that is an error."""
    streams = select.poll()
    for stream in (sys.stdout, sys.stderr):
        streams.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in streams.poll(0))


def _drop(stream: TextIO) -> None:
    """Have nowhere to write what is left in a stream, or Python complains about it while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_warning(message: Warning | str, *place: Any, **rest: Any) -> None:
    """Show a warning in one line. Where in the code it was raised is nothing to its user."""
    print_error(f"warning: {message}")


def _fail(error: Exception) -> int:
    """Show an error in one line, and return the exit code."""
    try:
        print_error(_text(error))
    except BrokenPipeError:
        _drop(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # what was to be written is what failed
        _drop(sys.stdout)
    return error.exit_code if isinstance(error, click.ClickException) else 1


def _text(error: Exception) -> str:
    """What is shown of an error. The type says something where it is not one of those for wrong arguments."""
    if isinstance(error, click.UsageError):
        place = error.ctx.command_path if error.ctx else "ejkernel"
        return f"{error.format_message()} ('{place} --help' describes it)"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"the output cannot be written: {error.strerror}; write it to a place with space (--debug shows where)"
    text = str(error) or "no message"
    is_clear = isinstance(error, (ValueError, OSError, _ClosedPipe)) or type(error).__module__.startswith("ejkernel_")
    return f"{text if is_clear else f'{type(error).__name__}: {text}'} (--debug shows where)"


@contextlib.contextmanager
def _hidden_closed_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ClosedPipe(str(error)) from error


class Commands(click.Group):
    """The subcommands that are installed, which are imported when they run."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _hidden_closed_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _hidden_closed_pipe():
            return super().invoke(ctx)

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
                f"{name!r} of {provider(points[0])}: {points[0].value} is not a command, but a {kind}"
            )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            for name, others in ELSEWHERE.items():
                if args[0] in others:
                    raise click.UsageError(f"'ejkernel {args[0]}' comes with {name}: pip install {name}", ctx)
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
