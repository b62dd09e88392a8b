"""Random damages of the files of a cache and of a package, everywhere in their folders.

No damage stops a call, an explanation or a command, constructs an object, or touches anything outside. Each is at most
one line of an explanation, and the call is computed with a configuration that its kernel takes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import click
import jax.numpy as jnp
import pytest

from ejkernel_cache import PackagedRecords, PersistentCache, default_cache, policy
from ejkernel_cache._contents import contents_of
from ejkernel_cache._exchange import pack
from ejkernel_cache.command import command
from ejkernel_cli import _findings, printable
from ejkernel_core import Operation, Record, Unsupported, hookimpl
from ejkernel_core.extend import EMPTY
from ejkernel_tuning import Entry, Progress, Trial

DAMAGES, PARTS = 2000, 20
#: One of so many damages is followed by real calls, which take most of the time. The others run the kernel of the plan.
CALLED = 37
#: What the kernel accepts. Its heuristic is 2.
FACTORS = range(1, 10)
X = jnp.arange(1.0, 6.0)

constructed: list[str] = []


@attrs.frozen
class AttrsTrap:
    """A class of the process that files name. Its objects would be noticed."""

    factor: int = 0

    def __attrs_post_init__(self) -> None:
        constructed.append(type(self).__name__)


@dataclasses.dataclass(frozen=True)
class DataclassTrap:
    factor: int = 0

    def __post_init__(self) -> None:
        constructed.append(type(self).__name__)


# -- kernels, a cache, a package, and what is outside ------------------------------------------------------------------


@hookimpl
def check_cfg(inv, cfg):
    if type(cfg.factor) is not int or cfg.factor not in FACTORS:
        raise Unsupported(f"it takes factors of 1 to 9; not {cfg.factor!r:.20}")


@hookimpl
def run_plain(inv, cfg):
    assert cfg is None
    return inv["x"] * 2


def start_process(scale_op: Any, package: Path) -> None:
    """As in a new process, nothing has been read of the cache and of the package."""
    default_cache.cache_clear()
    scale_op.registry.register(policy, "cache")
    scale_op.registry.register(PackagedRecords(package), "packaged")


@pytest.fixture
def whole(scale_op: Any, folder: Path, tmp_path: Path) -> Path:
    """A folder with a cache and a package that have all kinds of files."""
    scale_op.use(scale_op.Config(), lambda inv: map(scale_op.Config, FACTORS), check_cfg=check_cfg)
    scale_op.registry.register(Operation(name="plain", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    scale_op.registry.register(SimpleNamespace(run_backend=run_plain), "plain.two")
    cache, (exact, bucket) = PersistentCache(), scale_op.keys()
    plain = scale_op.registry.invocation("plain", X).key
    old_software = attrs.evolve(scale_op.record(4).provenance, software={"jax": "0.1"})
    for key, record in (
        (exact, Record(scale_op.Config(4), "two", old_software)),
        (exact, Record(scale_op.Config(7), "two", attrs.evolve(old_software, software={"jax": "0.2"}))),
        (bucket, scale_op.record(5)),
        (scale_op.keys(9)[0], Record(scale_op.Config(3))),
        (plain, Record(None, "two", old_software)),
    ):
        cache.put(key, record)
    cache.unfinished.take(bucket)
    cache.unfinished.keep(bucket, (Entry("two", scale_op.Config(6), 1.5, is_checked=True),))
    for name in ("crashed", "trying"):
        cache.unfinished.note(bucket, (Trial("two", scale_op.Config(8), "running"),))
        if name == "crashed":
            cache.unfinished._inherit(bucket)
            cache.unfinished._trials.clear()
    os.close(cache.unfinished._locks.pop(bucket.digest))
    (folder / ".tmp" / "somebodys").write_text("{")
    (folder / ".damaged").mkdir()
    (folder / ".damaged" / "old.json").write_text("{")
    pack(tmp_path / "project", "mine", "1.0", contents_of(folder))
    shutil.copytree(folder, tmp_path / "whole" / "cache")
    shutil.copytree(tmp_path / "project" / "mine", tmp_path / "whole" / "package")
    for device in folder.glob("[!.]*"):
        shutil.copytree(device / "plain", tmp_path / "whole" / "package" / device.name / "plain")
    return tmp_path / "whole"


@pytest.fixture
def outside(tmp_path: Path, whole: Path) -> Path:
    """What links lead to: copies of all files, under their own names and others."""
    shutil.copytree(whole, tmp_path / "outside")
    for name in ("somebodys.crashed", "somebodys.json", "somebodys.jsonl"):
        (tmp_path / "outside" / name).write_text("somebody's")
    os.mkfifo(tmp_path / "outside" / "fifo")
    return tmp_path / "outside"


def state(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


# -- damages -----------------------------------------------------------------------------------------------------------

CONTROL = "\x1b[2J\x07\x9b31m\x7f\r\u202e\x00"
TRAPS = [f"{__name__}.AttrsTrap", f"{__name__}.DataclassTrap"]
TEXTS = [
    "", CONTROL, "\ud800", "a\nb", "[/bold]", '"""\nimport os', "../../outside", "/dev/zero", "x" * 100_000, "two", "scale.two",
    "plain.two", "running", "0000-01-01T00:00:00+00:00", "2242-03-01T00:00:00+00:00", "nan", "1.5", *TRAPS,
]  # fmt: skip
#: In the place of a value, as they are in a file.
RAW = [
    "NaN", "-Infinity", "1e999", "-1", "-1.5", "1e-400", "0", "1", "true", "null", "[]", "{}", "9" * 400, "9" * 5000, "2.0",
    "[" * 100_000, "[" * 400 + "]" * 400, '{"a":' * 400 + "1" + "}" * 400, '{"!dtype": "O"}', '{"!array": []}', '{"factor": 7}',
]  # fmt: skip
MARK = "@raw@"
#: One byte more than a record may have.
HUGE = (1 << 20) + 1


def flip_bits(rng: random.Random, file: Path, outside: Path) -> None:
    data = bytearray(file.read_bytes() or b"x")
    for _ in range(rng.choice([1, 1, 1, 8, 64])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(rng: random.Random, file: Path, outside: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data) + 1)])


def insert_text(rng: random.Random, file: Path, outside: Path) -> None:
    data, text = file.read_bytes(), rng.choice([*TEXTS, *RAW]).encode(errors="surrogatepass")
    place = rng.randrange(len(data) + 1)
    file.write_bytes(data[:place] + text + data[place + rng.choice([0, 0, 1, 20]) :])


def write_bytes(rng: random.Random, file: Path, outside: Path) -> None:
    file.write_bytes(
        rng.choice([b"", b"\0" * 500, b"\xff\xfe{", b"[]", b"{}", b"null", b"[" * 100_000, rng.randbytes(99)])
    )


def make_huge(rng: random.Random, file: Path, outside: Path) -> None:
    os.truncate(file, rng.choice([HUGE, 1 << 33]))


def containers_of(data: Any) -> Iterator[Any]:
    if isinstance(data, (dict, list)) and data:
        yield data
        for part in data.values() if isinstance(data, dict) else data:
            yield from containers_of(part)


def change_document(rng: random.Random, file: Path, outside: Path) -> None:
    """Change a value, a name, or the number of the names, in a document that may be in a text of another one."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = rng.randrange(len(lines))
    lines[number] = changed_text(rng, lines[number])
    file.write_bytes("\n".join(lines).encode(errors="surrogatepass"))


def changed_text(rng: random.Random, text: str) -> str:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return rng.choice(TEXTS)
    containers = [*containers_of(data)]
    if not containers:
        return rng.choice(RAW)
    container = rng.choice(containers)
    name = rng.choice([*container] if isinstance(container, dict) else range(len(container)))
    value, kind = container[name], rng.randrange(6)
    if isinstance(value, str) and value.startswith("{") and kind < 3:
        container[name] = changed_text(rng, value)
    elif kind < 2:
        container[name] = MARK
    elif kind < 4:
        container[name] = rng.choice(TEXTS)
    elif isinstance(container, dict):
        container[rng.choice(TEXTS) if kind == 4 else f"{name}{MARK}"] = value
    else:
        del container[name]
    changed = json.dumps(data).replace(f'"{MARK}"', rng.choice(RAW))
    return changed.replace(f"{name}{MARK}", str(name))  # the same name twice


def name_a_class(rng: random.Random, file: Path, outside: Path) -> None:
    if file.suffix not in (".json", ".jsonl") or file.parent.name.startswith("."):
        change_document(rng, file, outside)
        return
    documents = [json.loads(line) for line in file.read_text().splitlines() if file.suffix == ".jsonl"]
    documents = documents or [json.loads(file.read_text())]
    for document in documents:
        document |= {"type": rng.choice(TRAPS), "config": {"factor": 7}}
        document |= {"kernel": None} if rng.randrange(2) else {}
    file.write_text("\n".join(map(json.dumps, documents)))
    if rng.randrange(2) and file.suffix == ".json":  # where records without a backend are
        (file.parents[1] / "%any").mkdir(exist_ok=True)
        file.rename(file.parents[1] / "%any" / file.name)


def replace(rng: random.Random, path: Path, outside: Path) -> None:
    """Put something else in the place of a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    twins = [twin for twin in outside.rglob(path.name) if twin.is_file() == (path.suffix != "")]
    target = rng.choice(
        [*twins, outside, outside / "fifo", outside / "somebodys.crashed", Path("/dev/zero"), path, Path("/none")]
    )
    kind = rng.choice(["link", "link", "link", "hard link", "fifo", "folder", "file", "socket", "nothing"])
    if kind == "link":
        path.symlink_to(target)
    elif kind == "hard link":
        os.link(rng.choice([twin for twin in outside.rglob("*") if twin.is_file()]), path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "more.json").mkdir(parents=True)
    elif kind == "file":
        path.write_text(rng.choice(["", "[]", "{"]))
    elif kind == "socket":
        bind_socket(path)


def bind_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name[:90])
    finally:
        os.chdir(here)


def rename(rng: random.Random, path: Path, outside: Path) -> None:
    name = rng.choice(["%", "%ZZ", "a\x1b[2J\n", "[bold]", "\udcff", "x" * 200, "..%2F", "scale"]) + rng.choice(
        ["", path.suffix]
    )
    path.rename(path.with_name(name))


def set_time(rng: random.Random, path: Path, outside: Path) -> None:
    seconds = rng.choice([0, -62_167_219_200 if path.is_dir() else 1, 8_583_000_000])
    os.utime(path, (seconds, seconds))


FILE_DAMAGES = [
    flip_bits,
    cut,
    insert_text,
    write_bytes,
    make_huge,
    change_document,
    change_document,
    change_document,
    name_a_class,
]
PATH_DAMAGES = [replace, replace, replace, rename, set_time]


def is_own_file(path: Path) -> bool:
    """Whether a file may be read and written: it is not huge, and not somebody's outside."""
    return path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1 and path.stat().st_size < HUGE


def damage(rng: random.Random, roots: list[Path], outside: Path) -> str:
    """Damage a random file or folder once or several times, and return what was done, for the message of a failure."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        paths = sorted(path for root in roots for path in root.rglob("*"))
        files = [path for path in paths if is_own_file(path)]
        if files and rng.random() < 0.7:
            harm, path = rng.choice(FILE_DAMAGES), rng.choice(files)
        else:
            harm, path = rng.choice(PATH_DAMAGES), rng.choice([p for p in paths if not p.is_symlink()])
        done.append(f"{harm.__name__} {path}")
        try:
            harm(rng, path, outside)
        except ValueError:  # it has been damaged before, and is not a document
            cut(rng, path, outside)
        except OSError as fault:  # a name or a time that this system does not take
            done.append(str(fault))
    return ", ".join(done)


# -- what has to hold --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_durability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def check_text(text: str, lines: int) -> None:
    assert all(character.isprintable() or character == "\n" for character in text), repr(text)
    assert len(text.splitlines()) <= lines, text


def check_answers(scale_op: Any, package: Path) -> None:
    """In a new process: an explanation, a measurement, and all that a cache is asked by hand."""
    start_process(scale_op, package)
    plan = scale_op.registry.explain("scale", X).plan
    for verdict in plan.verdicts:
        check_text(verdict.reason, 1)
    check_text(f"{plan}{plan!r}", 40)
    for plan_of_call in (plan, scale_op.registry.plan("plain", X)):
        factor = 2 if plan_of_call.cfg is None else plan_of_call.cfg.factor
        assert factor in FACTORS
        (result,) = plan_of_call.run(plan_of_call.invocation.with_arrays({"x": X}))
        assert result.tolist() == [x * factor for x in X.tolist()]
    inv, cache = plan.invocation, default_cache()
    earlier = policy.tuning_started(inv, EMPTY)
    assert {type(each.cfg) for each in (*earlier.entries, *earlier.crashed)} <= {scale_op.Config}
    assert all(e.milliseconds is None or 0 <= e.milliseconds < 1e10 for e in earlier.entries)
    policy.tuning_progress(inv, Progress(inv, earlier.entries, 1.0, 2.0, finished=True))
    for key, records in cache.items():
        check_text(f"{key}{key!r}{records!r}", 1)
    assert len(cache) >= 0
    cache.get(inv.key)
    cache.forget_crashes()


def check_commands(run: Callable[..., str], place: Path, package: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    for words in (
        ["ls"],
        ["import", package, "--path", place / "other"],
        ["pack", place / "package", "--name", "mine"],
        ["clear", "--yes"],
    ):
        check_text(run(*words), 5)
    assert [finding.subject for finding in _findings.cache()] == ["cache"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What ``ejkernel cache`` tells of errors. Any other exception than that of an error in one line is a fault."""

    def run(*words: object) -> str:
        capsys.readouterr()
        last = ""
        try:
            command.main([*map(str, words)], standalone_mode=False)
        except click.ClickException as error:
            last = error.format_message()
            check_text(printable(last), 1)
        output, errors = capsys.readouterr()
        check_text(output, 500)
        return f"{errors}{printable(last)}"

    return run


def check_damage(number: int, scale_op: Any, whole: Path, outside: Path, run: Callable[..., str]) -> None:
    rng, cache, package = random.Random(number), whole.parent / "cache", whole.parent / "package"
    for folder in (cache, package):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / folder.name, folder)
    what = damage(rng, [cache, package], outside)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            check_answers(scale_op, package)
            if number % CALLED == 0:
                assert scale_op.used_factor() in FACTORS  # which compares the results
                assert scale_op.registry.call("plain", X).tolist() == (X * 2).tolist()
            check_commands(run, whole.parent / "made", package)
            check_answers(scale_op, package)
            PersistentCache().put(scale_op.keys()[0], scale_op.record(9))
            check_answers(scale_op, package)
        for warning in told:
            check_text(str(warning.message), 1)
        assert constructed == []
    except BaseException as fault:
        fault.add_note(f"damage {number}: {what}")
        raise


def check_damages(numbers: range, scale_op: Any, whole: Path, outside: Path, run: Callable[..., str]) -> None:
    before = state(outside)
    constructed.clear()
    for number in numbers:
        check_damage(number, scale_op, whole, outside, run)
        assert state(outside) == before, f"damage {number}"


def test_some_damages_stop_nothing_construct_nothing_and_touch_nothing(
    scale_op: Any, whole: Path, outside: Path, run: Callable[..., str], watchdog: None
) -> None:
    check_damages(range(0, DAMAGES, DAMAGES // 24), scale_op, whole, outside, run)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_stops_constructs_or_touches_anything(
    scale_op: Any, whole: Path, outside: Path, run: Callable[..., str], watchdog: None, part: int
) -> None:
    check_damages(range(part, DAMAGES, PARTS), scale_op, whole, outside, run)


def test_the_whole_files_are_right(scale_op: Any, whole: Path, run: Callable[..., str]) -> None:
    """Otherwise damages would show nothing."""
    start_process(scale_op, whole / "package")
    assert scale_op.used_factor(length=9) == 3
    inv = scale_op.registry.invocation("scale", X)
    earlier = policy.tuning_started(inv, EMPTY)
    assert [(entry.cfg.factor, entry.milliseconds) for entry in earlier.entries] == [(6, 1.5), (8, None)]
    assert run("ls") == ""
    assert len(contents_of(default_cache().path).documents) == 5
    start_process(scale_op, whole / "package")
    PersistentCache().clear()
    assert scale_op.used_factor() in (4, 5, 7)
    assert scale_op.origin().startswith("packaged records")
