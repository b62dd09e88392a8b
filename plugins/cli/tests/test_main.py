"""The command as a whole: its errors, pipes and terminals, what it imports, and completion."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from ejkernel_cli import _metadata, print_table
from ejkernel_cli._main import ELSEWHERE, _debug_first, summary

COMMAND = [sys.executable, "-m", "ejkernel_cli"]


def one_line(process, code: int) -> str:
    """The error of a process that failed, which is one line, and nothing else."""
    assert (process.returncode, process.stderr.count("\n")) == (code, 1), process.stderr
    assert process.stderr.startswith("ejkernel: ")
    return process.stderr.removeprefix("ejkernel: ").rstrip("\n")


# -- errors ------------------------------------------------------------------------------------------------------------


def test_without_words_it_shows_its_help(run):
    process = run()
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("Usage: ejkernel [OPTIONS] COMMAND [ARGS]...")
    assert process.stdout == run("--help").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "no command is called 'lst'; did you mean 'list'?"),
        (["zzz"], "no command is called 'zzz'; there are "),
        (["list", "--jsn"], "'--jsn'"),
        (["list", "more"], "Got unexpected extra argument"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["explain"], "Missing argument 'OPERATION'"),
        (["explain", "flash_atention", "--shape", "3"], "no operation 'flash_atention' is installed; did you mean"),
        (["explain", "rms_norm", "--shape", "3x4", "--backend", "xlaa"], "did you mean 'xla'?"),
    ],
)
def test_wrong_usage_is_told_in_one_line(run, words, message):
    text = one_line(run(*words), 2)
    assert message in text
    assert "--help' describes it)" in text


def test_an_impossible_shape_is_told_by_the_operation(run):
    text = one_line(run("explain", "flash_attention", "--shape", "1x8x6x64", "--key", "1x8x4x64"), 1)
    assert text == "flash_attention: query: heads must be a multiple of kv_heads, which is 4 in key; got 6"


@pytest.mark.long
def test_without_a_device_a_call_is_not_explained(run_process):
    text = one_line(run_process("explain", "rms_norm", "--shape", "3x4", JAX_PLATFORMS="cuda"), 1)
    assert text.startswith("JAX has no device: JAX_PLATFORMS is 'cuda'")


BROKEN = {
    "raises": ("raise RuntimeError('no sun\\ntoday')", "'bad' of bad-dist 1.0 cannot be imported: RuntimeError: no sun today"),
    "has no command": ("def command(words): ...", "'bad' of bad-dist 1.0: bad:command is not a command, but a function"),
    "fails": (
        "import click\n@click.command()\ndef command(): raise KeyError('no sun')",
        "KeyError: 'no sun' (--debug shows where)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_subcommand_is_told_in_one_line(run, install, case):
    source, message = BROKEN[case]
    path = install("bad-dist", {"bad": source}, commands={"bad": "bad:command"})
    assert one_line(run("bad", path=path), 1) == message
    assert "bad" in run("--help", path=path).stdout.split()


@pytest.mark.long
@pytest.mark.parametrize("case", ["raises", "fails"])
def test_debug_shows_where_a_subcommand_is_broken(run_process, install, case):
    path = install("bad-dist", {"bad": BROKEN[case][0]}, commands={"bad": "bad:command"})
    process = run_process("bad", "--debug", path=path)
    assert process.returncode == 1
    assert process.stderr.startswith("Traceback")
    assert 'bad.py", line' in process.stderr


def test_a_subcommand_of_two_distributions_is_refused(run, install):
    path = install("bad-dist", {"bad": ""}, commands={"list": "bad:command"})
    text = one_line(run("list", path=path), 1)
    assert text.startswith("'list' is claimed by ")
    assert "bad-dist 1.0 (bad:command)" in text
    assert text.endswith("; uninstall one")


def test_a_subcommand_that_is_not_installed_is_named_with_its_distribution(run, monkeypatch):
    monkeypatch.setattr("ejkernel_cli._main.entry_points", lambda group: ())
    text = one_line(run("tpu", "fits"), 2)
    assert text.startswith("'ejkernel tpu' comes with ejkernel-pallas-tpu: pip install ejkernel-pallas-tpu")


def test_the_subcommands_of_other_distributions_are_known():
    distributions: dict[str, list[str]] = {}
    for point in _metadata.entry_points(_metadata.COMMANDS):
        distributions.setdefault(_metadata.distribution(point), []).append(point.name)
    del distributions["ejkernel-cli"]
    assert {name: tuple(sorted(names)) for name, names in distributions.items()} == ELSEWHERE


def test_a_warning_is_told_in_one_line(run, install):
    source = "import click, warnings\n@click.command()\ndef command(): warnings.warn('it is\\nlate')"
    process = run("warns", path=install("warn-dist", {"warns": source}, commands={"warns": "warns:command"}))
    assert (process.returncode, process.stderr) == (0, "ejkernel: warning: it is late\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list", "--json", "--debug"], ["--debug", "list", "--json"]),
        (["list"], ["list"]),
        (["new", "--", "--debug"], ["new", "--", "--debug"]),
    ],
)
def test_debug_may_be_anywhere(words, expected):
    assert _debug_first(words) == expected


def test_the_summary_of_a_subcommand_is_read_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "my_command.py").write_text('"""Do it.\n\nMore.\n"""\n1 / 0\n')
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("1 / 0\n")
    (tmp_path / "my_package" / "command.py").write_text("'''Do that.'''\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert summary("my_command:command") == "Do it"
    assert summary("my_package.command:command") == "Do that"
    assert summary("my_package:command") == summary("absent:command") == ""
    assert "my_command" not in sys.modules


# -- pipes and disks ---------------------------------------------------------------------------------------------------


def environment(**variables: str) -> dict[str, str]:
    # Unbuffered, output would fail earlier than that of a user.
    ours = ("EJKERNEL_", "COLUMNS", "PYTHONUNBUFFERED")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**rest, **variables}


def run_unread(words: str, folder, **options) -> subprocess.CompletedProcess[str]:
    """Run the command with an output that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    options = {"stderr": subprocess.PIPE, "env": environment(), **options}
    try:
        return subprocess.run(
            [*COMMAND, *words.split()], stdout=writer, cwd=folder, text=True, timeout=120, check=False, **options
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", ["list", "--help", "list --json", "", "cache --help", "new my-own --kind store"])
def test_a_closed_pipe_is_silent(words, tmp_path):
    process = run_unread(words, tmp_path)
    assert (process.returncode, process.stderr) == (0, "")


#: By subcommand: the words with which it prints something soon.
PRINTING = {
    "bench": "bench",
    "cache": "cache ls",
    "completion": "completion zsh",
    "doctor": "doctor",
    "explain": "explain rms_norm --shape 3x8",
    "list": "list --here",
    "new": "new my-own --kind policy",
    "records": "records folder rms_norm --seconds 0.01",
    "run": "run --rounds 1",
    "tpu": "tpu --help",
    "triton": "triton --help",
    "tune": "tune rms_norm --shape 3x8",
}


@pytest.mark.long
@pytest.mark.parametrize("name", [point.name for point in _metadata.entry_points(_metadata.COMMANDS)])
def test_a_closed_pipe_ends_every_subcommand_alike(name, tmp_path):
    process = run_unread(PRINTING[name], tmp_path, env=environment(EJKERNEL_CACHE_DIR=str(tmp_path / "configs")))
    lines = [line for line in process.stderr.splitlines() if not line.startswith("measuring ")]
    assert (process.returncode, lines) == (0, [])


def test_wrong_words_are_wrong_where_nobody_reads_that(tmp_path):
    assert run_unread("lst", tmp_path, stderr=subprocess.STDOUT).returncode == 2


def run_with_closed(streams: str, *words: str) -> tuple[int, str, str]:
    """The exit code and the output of a subcommand whose caller has closed these streams, as ">&-" does."""
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", *COMMAND, *words]
    process = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(streams):
    code, text, errors = run_with_closed(streams, "list")
    assert (code, errors) == (0, "")
    assert ("flash_attention" in text) == (" >" not in f" {streams}")
    code, text, errors = run_with_closed(streams, "lst")
    assert (code, text) == (2, "")
    assert errors.count("\n") == ("2>" not in streams)


def test_a_closed_input_is_an_empty_one():
    code, text, errors = run_with_closed("<&-", "cache", "import", "-")
    assert (code, text) == (1, "")
    assert errors.startswith("ejkernel: no records in the standard input; ")
    assert errors.count("\n") == 1


CLOSED = """
import os, sys
for number in range(3):
    os.close(number)
sys.stdin = sys.stdout = sys.stderr = None
from ejkernel_cli import _main
_main._open_closed_streams()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for number in (1, 2):
    os.write(number, b"lost")
print("lost", file=sys.stderr)
os.write(file, f"{file > 2} {os.get_inheritable(2)} {sys.stdin.read()!r}".encode())
"""


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    file = tmp_path / "record"
    subprocess.run([sys.executable, "-c", CLOSED, file], check=True, timeout=60)
    assert file.read_text() == "True True ''"


def test_a_broken_pipe_to_another_process_is_an_error(run, install):
    source = "import click\n@click.command()\ndef command(): raise BrokenPipeError(32, 'the worker has ended')"
    path = install("pipe-dist", {"pipes": source}, commands={"pipes": "pipes:command"})
    assert one_line(run("pipes", path=path), 1) == "[Errno 32] the worker has ended (--debug shows where)"


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["completion", "fish"]], ids=" ".join)
def test_a_full_disk_is_told_in_one_line(words):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*COMMAND, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )
    assert one_line(process, 1).startswith("the output cannot be written: No space left on device; write it to")


#: A subcommand whose output is not flushed before it ends.
PRINTS = "import click\n@click.command()\ndef command(): print('x' * 10)"


@pytest.mark.long
def test_output_of_a_subcommand_that_prints_may_fail_too(install):
    path = install("print-dist", {"prints": PRINTS}, commands={"prints": "prints:command"})
    variables = environment(PYTHONPATH=os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    options = {"stderr": subprocess.PIPE, "text": True, "env": variables, "timeout": 60, "check": False}
    process = run_unread("prints", None, env=variables)
    assert (process.returncode, process.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        assert "No space left on device" in one_line(subprocess.run([*COMMAND, "prints"], stdout=full, **options), 1)


def test_a_program_that_is_interrupted_says_nothing(run, install):
    source = "import click\n@click.command()\ndef command(): raise KeyboardInterrupt"
    process = run("stop", path=install("stop-dist", {"stop": source}, commands={"stop": "stop:command"}))
    assert (process.returncode, process.stdout, process.stderr.strip()) == (130, "", "")


# -- terminals ---------------------------------------------------------------------------------------------------------


def output_in_terminal(words: list[str], width: int, **variables: str) -> str:
    """What the command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    variables = environment(**{"TERM": "xterm-256color", **variables})
    process = subprocess.Popen([*COMMAND, *words], stdout=theirs, stderr=theirs, stdin=theirs, env=variables)
    os.close(theirs)
    text, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                text += os.read(ours, 4096)
    except OSError:  # the other end is closed
        pass
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return text.decode().replace("\r\n", "\n")


def test_a_narrow_terminal_gets_everything_in_its_width():
    text = re.sub(r"\x1b\[[0-9;]*m", "", output_in_terminal(["list"], 40, NO_COLOR="1"))
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= 40
    joined = "".join(text.split())
    for name in ("flash_attention_bwd", "pallas_tpu", "gluon_sm90"):
        assert name in joined or all(part in joined for part in (name[:6], name[-4:]))
    assert "…" not in text


def test_a_table_loses_nothing_where_it_is_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = "flash_attention_bwd_zzzzzz1234", "pallas_tpu_quantized_abcdefghi"
    print_table(("a", "b"), [words])
    cells = [(line[:20], line[20:]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert ["".join(column).replace(" ", "") for column in zip(*cells, strict=True)] == [*words]


@pytest.mark.long
def test_colors_are_for_terminals_that_want_them():
    assert "\x1b[" in output_in_terminal(["list"], 80)
    assert "\x1b[3" not in output_in_terminal(["list"], 80, NO_COLOR="1")
    assert "\x1b[" not in output_in_terminal(["list"], 80, TERM="dumb")


# -- what is imported --------------------------------------------------------------------------------------------------

MODULES = """
import json, sys
from ejkernel_cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--help"], {}),
        (["list"], {}),
        (["list", "--json"], {}),
        (["doctor", "--help"], {}),
        (["explain", "--help"], {}),
        (["completion", "bash"], {}),
        ([], {"_EJKERNEL_COMPLETE": "bash_complete", "COMP_WORDS": "ejkernel explain fl", "COMP_CWORD": "2"}),
        ([], {"_EJKERNEL_COMPLETE": "zsh_complete", "COMP_WORDS": "ejkernel l", "COMP_CWORD": "1"}),
    ],
    ids=["help", "list", "json", "doctor help", "explain help", "completion", "operations", "commands"],
)
def test_what_is_read_from_metadata_imports_neither_jax_nor_the_core(words, variables):
    process = subprocess.run(
        [sys.executable, "-c", MODULES, *words],
        env=environment(**variables), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    modules = set(json.loads(process.stderr.splitlines()[-1]))
    assert process.stdout
    assert "click" in modules
    assert (
        modules & {"jax", "numpy", "ejkernel_core", "ejkernel_ops", "ejkernel_cache", "triton", "matplotlib"} == set()
    )


# -- completion --------------------------------------------------------------------------------------------------------


def completions(run, line: str) -> list[str]:
    words = line.split(" ")
    variables = {"_EJKERNEL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    process = run(**variables)
    assert process.stderr == ""
    return [word.partition(",")[2] for word in process.stdout.split()]


def test_subcommands_options_and_operations_are_completed(run):
    assert completions(run, "ejkernel exp") == ["explain"]
    assert completions(run, "ejkernel explain flash") == ["flash_attention", "flash_attention_bwd"]
    assert completions(run, "ejkernel explain flash_attention --backend gl") == ["gluon_decode_sm90", "gluon_sm90"]
    assert completions(run, "ejkernel list --h") == ["--here", "--help"]
    assert completions(run, "ejkernel zzz fl") == []


@pytest.mark.long
def test_a_real_bash_completes_by_the_script(run, tmp_path):
    command = tmp_path / "ejkernel"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ejkernel_cli "$@"\n')
    command.chmod(0o755)
    script = run("completion", "bash").stdout
    line = 'COMP_WORDS=(ejkernel explain lay); COMP_CWORD=2; _ejkernel_completion ejkernel; echo "${COMPREPLY[@]}"'
    variables = environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    process = subprocess.run(
        ["bash", "-c", f"{script}\n{line}"], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.stdout.split() == ["layer_norm", "layer_norm_bwd", "layer_norm_quantized"], process.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(run, shell):
    process = run("completion", shell)
    assert (process.returncode, process.stderr) == (0, "")
    assert f"_EJKERNEL_COMPLETE={shell}_complete" in process.stdout
