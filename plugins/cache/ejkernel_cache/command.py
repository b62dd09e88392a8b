"""Show, compare, share and remove the configurations that were measured.

The subcommands read the files of a cache as they are, so the kernels of the records need not be installed. They work
while other processes use the cache.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ejkernel_cli import (
    Failure,
    config_text,
    json_option,
    print_error,
    print_json,
    print_line,
    print_table,
    printable,
    writable_by_others,
)

if TYPE_CHECKING:
    from ._contents import Contents, Document, Fault
    from ._store import PersistentCache

Function = TypeVar("Function", bound=Callable[..., Any])
#: The digits of a key that tables show, and with which "show" finds it.
DIGITS = 8
#: How many faults are shown; those of a file that has no records at all say the same in every line.
MOST_FAULTS = 3


class _Commands(click.Group):
    """Subcommands whose summaries are folded in a narrow terminal. Click would cut them off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            names = self.list_commands(ctx)
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(limit=1000).rstrip(".")) for name in names]
            )


@click.group("cache", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show, compare, share and remove the configurations that were measured."""


def path_option(is_made: bool = False) -> Callable[[Function], Function]:
    """The option ``--path``: a folder that exists, or one that is made. The default one need not exist."""
    return click.option(
        "--path",
        type=click.Path(exists=not is_made, file_okay=False),
        help="The folder. [default: EJKERNEL_CACHE_DIR, or the user's cache]",
    )


def filter_options(function: Function) -> Function:
    """The options ``--op`` and ``--device``."""
    op = click.option("--op", metavar="NAME", help="This operation alone; 'flash*' for several.")
    device = click.option("--device", metavar="TEXT", help="Devices whose names contain this text.")
    return op(device(function))


# -- look --------------------------------------------------------------------------------------------------------------


@command.command("ls")
@path_option()
@filter_options
@json_option
def list_records(path: str | None, op: str | None, device: str | None, as_json: bool) -> None:
    """List devices and operations: how many records there are, their size, and the newest."""
    cache = _cache(path)
    contents = _selected(cache.path, op, device)
    groups = [
        (*names, list(documents))
        for names, documents in itertools.groupby(contents.documents, lambda d: (d.key.device, d.key.op))
    ]
    if as_json:
        rows = [
            {"device": d, "operation": o, "records": len(docs), "bytes": _size(docs), "newest": _newest(docs)}
            for d, o, docs in groups
        ]
        print_json({"path": str(cache.path), "rows": rows, "faults": list(map(str, contents.faults))})
    elif not groups:
        print_line(_nothing(contents, cache.path))
    else:
        for name, rows_of_device in itertools.groupby(groups, lambda group: group[0]):
            rows_of_text = [(o, len(docs), _bytes(_size(docs)), _date(_newest(docs))) for _, o, docs in rows_of_device]
            print_table(("operation", "records", "size", "newest"), rows_of_text, title=name)
            print_line()
        print_line(f"{_count(contents.documents)} in {cache.path}")
    _tell(contents)


@command.command("show")
@click.argument("what", metavar="OPERATION|KEY")
@path_option()
@click.option("--device", metavar="TEXT", help="Devices whose names contain this text.")
@json_option
def show_records(what: str, path: str | None, device: str | None, as_json: bool) -> None:
    """Show the records of an operation; for the key of one call, every configuration that was tried, too.

    A key is what the tables show, or the beginning of it. "bucket" is for all calls of about these sizes.
    """
    if not what:
        raise click.UsageError("it takes an operation or a key; 'ejkernel cache ls' has the operations")
    from ._contents import Contents

    cache = _cache(path)
    everything = _contents(cache.path)
    contents, of_key = everything.select(what, device), everything.select(None, device, what)
    if not contents.documents:
        contents = Contents(of_key.documents, tuple(dict.fromkeys(contents.faults + of_key.faults)))
    documents = contents.documents
    if not documents:
        _fail_with_faults(contents.faults, _nothing(everything, cache.path, what, device))
    if as_json:
        print_json([_as_json(document) for document in documents])
    else:
        for title, group in _by_measurement(documents).items():
            print_table(("key", "call", "configuration", "time", "when"), map(_row, group), title)
            print_line()
        if all(document.key.op != what for document in documents):
            _print_tried(documents)
    _tell(contents)


def _row(document: Document) -> tuple[str, ...]:
    from ._contents import margins

    ratios = margins(document.backend, document.provenance)
    times = [f"{ratio:.3g}x {name}" for name, ratio in ratios.items()]
    return (
        document.key.digest[:DIGITS],
        _call(document),
        _configuration(document),
        "\n".join(filter(None, [_milliseconds(document), *times])),
        document.when[:10] or "by hand",
    )


def _call(document: Document) -> str:
    from ._contents import call_lines

    return "\n".join([*(["bucket of"] if document.is_for_bucket else []), *call_lines(document.key)])


def _configuration(document: Document) -> str:
    return "\n".join(filter(None, [document.backend or "any backend", config_text(document.fields)]))


def _print_tried(documents: Iterable[Document]) -> None:
    unique = {d.provenance.tried: d for d in documents if d.provenance is not None and d.provenance.tried}
    for document in unique.values():
        assert document.provenance is not None
        rows = [_tried_row(*text.partition(" ")[::2], outcome) for text, outcome in document.provenance.tried]
        print_table(("tried", "configuration", "ms", "out because"), rows, title=f"key {document.key.digest[:DIGITS]}")
        if document.provenance.shortfall:
            print_line(str(document.provenance.shortfall))


def _tried_row(backend: str, cfg: str, outcome: float | str) -> tuple[str, ...]:
    times = ("", outcome) if isinstance(outcome, str) else (f"{outcome:.4g}", "")
    return backend, config_text(cfg), *times


@command.command("diff")
@click.argument("one", type=click.Path(exists=True))
@click.argument("other", type=click.Path(exists=True))
@filter_options
@json_option
def compare_records(one: str, other: str, op: str | None, device: str | None, as_json: bool) -> None:
    """Compare two folders or files of records: what only one has, and where the best configurations differ.

    A folder is that of a cache or of a package of records; a file is what "export" writes.
    """
    paths = [Path(path) for path in (one, other)]
    for folder in filter(Path.is_dir, paths):
        _expect_trusted(folder)
    both = [_contents(path, "name another one") for path in paths]
    contents = [each.select(op, device) for each in both]
    if (op or device) and not any(each.documents for each in contents):
        text = _nothing(both[0] | both[1], f"{one} and {other}", op, device)
        _fail_with_faults(contents[0].faults + contents[1].faults, text)
    firsts, seconds = (c.latest() for c in contents)
    only = [[d for problem, d in a.items() if problem not in b] for a, b in ((firsts, seconds), (seconds, firsts))]
    pairs = [(firsts[problem], seconds[problem]) for problem in firsts if problem in seconds]
    different = [(a, b) for a, b in pairs if (a.backend, a.config) != (b.backend, b.config)]
    equal = [(a, b) for a, b in pairs if (a.backend, a.config) == (b.backend, b.config)]
    if as_json:
        print_json(
            {
                "only_in_first": [_as_json(document) for document in only[0]],
                "only_in_second": [_as_json(document) for document in only[1]],
                "different": [[_as_json(a), _as_json(b)] for a, b in different],
                "equal": [[_as_json(a), _as_json(b)] for a, b in equal],
            }
        )
    else:
        for path, documents in zip((one, other), only, strict=True):
            if documents:
                print_table(("key", "call", "configuration", "time"), map(_short_row, documents), f"only in {path}")
        if different:
            print_table(("key", "call", one, other, "time"), itertools.starmap(_pair, different), "different")
        print_line(
            f"{len(only[0])} only in {one}, {len(only[1])} only in {other}, {len(different)} different, {len(equal)} "
            f"with the same configuration{_range(equal)}"
        )
        from ejkernel_core.extend import quantity

        others = [len(c.documents) - len(latest) for c, latest in zip(contents, (firsts, seconds), strict=True)]
        if any(others):
            first_count, second_count = (quantity(count, "record") for count in others)
            print_line(
                f"not compared: {first_count} in {one} and {second_count} in {other}, of slower kernels or of older "
                "measurements of the same calls"
            )
    for each in contents:
        _tell(each)


def _short_row(document: Document) -> tuple[str, ...]:
    call = f"{document.key.op} on {document.key.device}\n{_call(document)}"
    return document.key.digest[:DIGITS], call, _configuration(document), _milliseconds(document)


def _pair(a: Document, b: Document) -> tuple[str, ...]:
    call = f"{a.key.op} on {a.key.device}\n{_call(a)}"
    cells = [f"{_configuration(document)}\n{_milliseconds(document)}" for document in (a, b)]
    return a.key.digest[:DIGITS], call, *cells, _ratio(a, b)


def _ratio(a: Document, b: Document) -> str:
    return f"{b.milliseconds / a.milliseconds:.3g}x" if a.milliseconds and b.milliseconds else ""


def _range(pairs: Sequence[tuple[Document, Document]]) -> str:
    """How many times as long the second ones take."""
    ratios = [b.milliseconds / a.milliseconds for a, b in pairs if a.milliseconds and b.milliseconds]
    if not ratios:
        return ""
    least, most = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
    if least == most == "1":
        return ", which takes as long in the second"
    return f", which takes {least if least == most else f'{least} to {most}'} times as long in the second"


# -- share -------------------------------------------------------------------------------------------------------------


@command.command("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@path_option()
@filter_options
def export_records(file: str, path: str | None, op: str | None, device: str | None) -> None:
    """Write the records into one file, a line of JSON for each; "-" is the standard output."""
    from ._exchange import write_lines

    cache = _cache(path)
    contents = _selected(cache.path, op, device)
    if not contents.documents:
        _fail_with_faults(contents.faults, _nothing(contents, cache.path))
    if file == "-":
        for document in contents.documents:
            print_line(document.text)
    else:
        _write(lambda: write_lines(Path(file), contents.documents))
        print_line(f"{_count(contents.documents)} written to {file}")
    _tell(contents)


@command.command("import")
@click.argument("file", type=click.Path(exists=True, allow_dash=True))
@path_option(is_made=True)
@filter_options
def import_records(file: str, path: str | None, op: str | None, device: str | None) -> None:
    """Put the records of a file, of a folder or of a package into the cache; "-" is the standard input.

    Of two records of one call, the one that was measured better stays: with a larger budget, against more backends, or
    faster. Records of other versions stay beside each other.
    """
    from ._exchange import merge

    cache = _cache(path)
    all_records = _standard_input() if file == "-" else _contents(_records_in(Path(file)), "name another one")
    contents, name = all_records.select(op, device), "the standard input" if file == "-" else file
    if not all_records.documents and not all_records.faults:
        raise Failure(f"no records in {name}; import takes what 'export' and 'pack' have written")
    if not contents.documents and all_records.documents:
        _fail_with_faults(contents.faults, _nothing(all_records, name, op, device))
    merged = _write(lambda: merge(cache, contents.documents))
    counts = (
        (merged.added, "added"),
        (merged.replaced, "replaced by better ones"),
        (merged.kept, "not better than those here"),
        (merged.same, "the same"),
    )
    print_line(", ".join(f"{count} {what}" for count, what in counts if count) or "no records")
    _tell(contents)


def _standard_input() -> Contents:
    from ._contents import contents_of_lines

    return contents_of_lines(sys.stdin.buffer, "the standard input")


def _records_in(place: Path) -> Path:
    """The folder of the records, where a project like those that "pack" writes has them in its package."""
    packages = [file.parent for file in place.glob("*/__init__.py")] if (place / "pyproject.toml").is_file() else []
    return packages[0] if len(packages) == 1 else place


@command.command("pack")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--name", required=True, metavar="NAME", help="The name of the distribution, as in my-records.")
@click.option("--version", default="1.0", show_default=True, metavar="VERSION", help="Its version.")
@path_option()
@filter_options
def pack_records(folder: str, name: str, version: str, path: str | None, op: str | None, device: str | None) -> None:
    """Make a package of the records, which answers for those who install it.

    It has the best record of the latest measurement of each call.
    """
    from ._exchange import pack

    cache = _cache(path)
    contents = _selected(cache.path, op, device)
    if not contents.documents:
        _fail_with_faults(contents.faults, _nothing(contents, cache.path))
    try:
        files = _write(lambda: pack(Path(folder), name, version, contents))
    except FileExistsError as fault:
        raise Failure(f"{folder} exists and is not empty; name another folder") from fault
    except ValueError as fault:
        option, _, text = str(fault).partition(": ")
        raise click.BadParameter(text, param_hint=f"'--{option}'") from fault
    for file in files:
        print_line(str(file))
    # With a name alone, pip would look for it in its index.
    print_line(f"install it: pip install {folder if Path(folder).is_absolute() else f'./{folder}'}")
    _tell(contents)


# -- remove ------------------------------------------------------------------------------------------------------------


@command.command("clear")
@path_option()
@filter_options
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_records(path: str | None, op: str | None, device: str | None, yes: bool) -> None:
    """Remove records. Unfinished measurements and damaged files that were moved aside stay."""
    cache = _cache(path)
    contents = _selected(cache.path, op, device)
    if not contents.documents:
        print_line(_nothing(contents, cache.path))
        return
    if not yes:
        records = f"{_count(contents.documents)} from {cache.path}"
        if not sys.stdin.isatty():
            raise click.UsageError(f"this removes {records}: pass --yes to do it without asking")
        if not click.confirm(printable(f"Remove {records}?")):
            raise Failure("nothing was removed")
    keys = {document.key for document in contents.documents}
    advice = "what is left stays: get the right to write to its folder"
    removed = _write(lambda: cache.remove(lambda key: key in keys), "removed", advice)
    print_line(f"{removed} removed from {cache.path}")


# -- what they share ---------------------------------------------------------------------------------------------------


def _cache(path: str | None) -> PersistentCache:
    from ._store import PersistentCache, default_cache

    cache = default_cache() if path is None else PersistentCache(path)
    if cache.path.exists() and not cache.path.is_dir():
        raise Failure(f"{cache.path} is not a folder; set EJKERNEL_CACHE_DIR, or pass --path, to a folder")
    _expect_trusted(cache.path)
    return cache


def _expect_trusted(folder: Path) -> None:
    """Warn once where others can write to a folder or to what is in it; fail if the environment forbids that."""
    from ejkernel_core import UntrustedFolder

    from ._trust import tell_of_other_writers

    path = next(writable_by_others(folder), None)
    try:
        if path is not None:
            tell_of_other_writers(path, folder)
    except UntrustedFolder as fault:
        raise Failure(str(fault)) from fault


def _contents(path: Path, advice: str = "set EJKERNEL_CACHE_DIR, or pass --path, to another folder") -> Contents:
    from ._contents import contents_of

    try:
        return contents_of(path)
    except OSError as fault:
        reason = f"{fault.filename or path} cannot be read: {fault.strerror or fault}"
        raise Failure(f"{reason}; get the right to read it, or {advice}") from fault


def _selected(path: Path, op: str | None, device: str | None) -> Contents:
    """The selected records of a cache. Fails if none is of these."""
    contents = _contents(path)
    selection = contents.select(op, device)
    if (op or device) and not selection.documents:
        _fail_with_faults(selection.faults, _nothing(contents, path, op, device))
    return selection


Result = TypeVar("Result")


def _write(
    write: Callable[[], Result], verb: str = "written", advice: str = "name a place with space that can be written to"
) -> Result:
    """The result of ``write``. What the system refuses is told in one line."""
    try:
        return write()
    except (FileExistsError, BrokenPipeError):
        raise
    except OSError as fault:
        place = f"{fault.filename} cannot be {verb}: " if fault.filename else ""
        raise Failure(f"{place}{fault.strerror or fault}; {advice}, and run it again") from fault


def _tell(contents: Contents) -> None:
    """Tell what could not be read, and fail if there is such."""
    if contents.faults:
        number = len(contents.faults)
        _fail_with_faults(
            contents.faults,
            f"{number} record{'s' * (number > 1)} could not be read and {'are' if number > 1 else 'is'} left out",
        )


def _fail_with_faults(faults: Sequence[Fault], text: str) -> NoReturn:
    for fault in faults[:MOST_FAULTS]:
        print_error(fault)
    if len(faults) > MOST_FAULTS:
        print_error(f"... and {len(faults) - MOST_FAULTS} more")
    raise Failure(text)


def _by_measurement(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """The documents by operation, device and versions, in words."""
    groups: dict[str, list[Document]] = {}
    for document in documents:
        software = document.provenance.software if document.provenance else {}
        versions = ", ".join(f"{name} {version}" for name, version in sorted(software.items()))
        title = f"{document.key.op} on {document.key.device}{', with ' if versions else ''}{versions}"
        groups.setdefault(title, []).append(document)
    return groups


def _as_json(document: Document) -> dict[str, Any]:
    import json

    from ._contents import margins

    record = json.loads(document.text)
    return {
        "key": document.key.digest,
        "place": document.place,
        "margins": margins(document.backend, document.provenance),
        **record,
    }


def _nothing(contents: Contents, place: object, op: str | None = None, device: str | None = None) -> str:
    """That no record of the contents is selected, and what they have instead."""
    from ejkernel_core.extend import suggestion

    text = "".join(f" {name} {value!r}" for name, value in (("of", op), ("on", device)) if value)
    text = f"no records{text} in {place}"
    if not contents.documents:
        return f"{text}; 'ejkernel tune' measures them"
    of_op = contents.select(op).documents
    names = sorted({document.key.device for document in of_op} or {document.key.op for document in contents.documents})
    return text + ((not of_op and suggestion(str(op), names)) or f"; there are {', '.join(map(repr, names))}")


def _count(documents: Sequence[Document]) -> str:
    return f"{len(documents)} record{'s' * (len(documents) != 1)}"


def _size(documents: Iterable[Document]) -> int:
    return sum(document.size for document in documents)


def _bytes(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def _newest(documents: Iterable[Document]) -> str:
    return max((document.when for document in documents), default="")


def _date(when: str) -> str:
    return when[:16].replace("T", " ")


def _milliseconds(document: Document) -> str:
    return "" if document.milliseconds is None else f"{document.milliseconds:.4g} ms"
