"""``ejkernel bench`` and ``ejkernel run``: suites of any distribution, broken ones, files, and what comes when."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from importlib.metadata import distribution, entry_points
from xml.etree import ElementTree

import click
import pytest

from ejkernel_bench import demonstration
from ejkernel_bench._report import Report
from ejkernel_bench._suites import GROUP, BrokenSuite, suites
from ejkernel_bench.commands import run
from ejkernel_cli import _findings
from ejkernel_ops.flash_attention.sizes import self_attention

MODULE = '''
"""How fast nothing is.

More.
"""

import signal

from ejkernel_bench.suite import Report, Rows

def run(rounds=1):
    return Report("nothing", (), text=f"{rounds} rounds of nothing")

def measure(backend=None):
    """A function as a suite."""
    return Report("function", (), faults=["wrong"])

def fail():
    """A suite that fails."""
    1 / 0

def add_rows():
    """A suite with rows."""
    rows = Rows("milliseconds", ("", "ours", "theirs"), series=("ours", "theirs"))
    rows.add("first", 1.0, 2.0)
    rows.add("second", 3.0, "-")
    return Report("rows", [rows.table()])

def be_ended():
    """A suite that takes longer than it may."""
    rows = Rows("milliseconds", ("", "ours", "theirs"), series=("ours",))
    rows.add("first", 1.0, 2.0)
    signal.raise_signal(signal.SIGTERM)
    rows.add("second", 3.0, 4.0)
    return Report("ended", [rows.table()])
'''


@pytest.fixture
def install_suites(tmp_path, monkeypatch):
    """Installs a distribution with these suites."""

    def install(distribution_name, **values):
        folder = tmp_path / f"{distribution_name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution_name}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in values.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))

    (tmp_path / "third_party_suites.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield install
    sys.modules.pop("third_party_suites", None)


def descriptions_from(ejkernel):
    code, output, _ = ejkernel("bench")
    assert code == 0
    return dict(line.split(maxsplit=1) for line in output.splitlines())


def test_without_a_name_it_lists_every_suite_with_a_description(ejkernel):
    descriptions = descriptions_from(ejkernel)
    names = {
        entry_point.name for entry_point in distribution("ejkernel-bench").entry_points if entry_point.group == GROUP
    }
    assert names <= {*descriptions}
    assert names >= {"flash_attention", "hopper", "shapes", "ranking", "serve", "loss"}
    assert not any("BROKEN" in descriptions[name] for name in names)
    assert descriptions["attention"] == "Attention against jax.nn.dot_product_attention, S 4096, causal and full"


def test_a_distribution_adds_suites(install_suites, ejkernel):
    install_suites("third-party", nothing="third_party_suites", function="third_party_suites:measure")
    descriptions = descriptions_from(ejkernel)
    assert descriptions["nothing"] == "How fast nothing is"
    assert descriptions["function"] == "A function as a suite"
    code, output, _ = ejkernel("bench", "nothing", "--rounds", "3")
    assert code == 0
    assert "3 rounds of nothing" in output
    assert ejkernel("bench", "function")[0] == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("third_party_suites:absent", "cannot be imported: AttributeError:"),
        ("json", "is neither a module with a function 'run' nor a function"),
    ],
)
def test_a_broken_suite_is_reported_by_name_and_distribution_and_the_others_run(
    install_suites, ejkernel, value, reason
):
    install_suites("third-party", nothing="third_party_suites", broken=value)
    assert descriptions_from(ejkernel)["broken"].startswith(f"BROKEN: 'broken' of third-party 1.0 ({value}) {reason}")
    code, output, error = ejkernel("bench", "broken", "nothing")
    assert code == 1
    assert "1 rounds of nothing" in output
    assert f"BROKEN: 'broken' of third-party 1.0 ({value}) {reason}" in error
    assert error.count("\n") == 1


def test_a_name_of_two_distributions_is_broken(install_suites, ejkernel):
    install_suites("third-party", nothing="third_party_suites")
    install_suites("fourth-party", nothing="third_party_suites:measure")
    with pytest.raises(BrokenSuite, match="'nothing' is claimed by"):
        suites()["nothing"].load()
    assert {"third-party 1.0 (third_party_suites)", "fourth-party 1.0 (third_party_suites:measure)"} <= {
        part.removeprefix("'nothing' is claimed by ").strip()
        for part in descriptions_from(ejkernel)["nothing"].removeprefix("BROKEN: ").split(";")[0].split(" and ")
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["atention"], "no benchmark is called 'atention'; did you mean 'attention'?"),
        (["xyz"], "no benchmark is called 'xyz'; there are attention, decode"),
        (["rms_norm_bwd"], "'rms_norm_bwd' has no suite of its own; measure it at given shapes"),
        (["attention", "--fast"], "there is no option --fast"),
        (["ranking", "--rounds", "0"], "--rounds"),
        (["ranking", "--rounds", "3"], "ranking has no rounds; --rounds is for suites that time calls in turn"),
        (["ranking", "--peers"], "ranking always has its peers"),
        (["attention", "--small"], "attention has one set of sizes"),
        (
            ["rms_norm", "--small", "--backend", "xlaa"],
            "no backend 'xlaa' of 'rms_norm' is installed; did you mean 'xla'?",
        ),
        (["ranking", "--picture", "path.gif"], "--picture takes a file that ends in .svg, .png, .pdf"),
        (["--from", "reports.json"], "--from reads what --picture draws"),
    ],
)
def test_wrong_usage_is_one_line(ejkernel, words, message):
    code, _, error = ejkernel("bench", *words)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--picture"])
@pytest.mark.parametrize("command", ["bench nothing", "run"])
@pytest.mark.parametrize(
    ("name", "reason"), [("absent/file.svg", "there is no folder"), ("folder", "is a folder; name a file")]
)
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    install_suites, ejkernel, monkeypatch, tmp_path, option, command, name, reason
):
    install_suites("third-party", nothing="third_party_suites")
    (tmp_path / "folder").mkdir()
    code, output, error = ejkernel(*command.split(), option, str(tmp_path / name))
    assert (code, output) == (1, "")
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a file that is always full")
def test_a_full_disk_is_one_line_after_the_report(install_suites, ejkernel):
    install_suites("third-party", nothing="third_party_suites")
    code, output, error = ejkernel("bench", "nothing", "--json", "/dev/full")
    assert code == 1
    assert "1 rounds of nothing" in output
    assert error == "ejkernel: /dev/full cannot be written: No space left on device; the reports are above\n"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', '[{"benchmark": "x"}]', None])
def test_a_file_without_reports_is_one_line(ejkernel, tmp_path, content):
    file = tmp_path / "reports.json"
    if content is not None:
        file.write_text(content)
    code, _, error = ejkernel("bench", "--from", str(file), "--picture", str(tmp_path / "picture.svg"))
    assert code == 1
    assert str(file) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "picture.svg").exists()


def test_nothing_to_draw_is_one_line(install_suites, ejkernel, tmp_path):
    install_suites("third-party", nothing="third_party_suites")
    code, _, error = ejkernel("bench", "nothing", "--picture", str(tmp_path / "picture.svg"))
    assert code == 1
    assert "is not drawn: there is nothing to draw" in error


def test_a_suite_that_fails_is_one_line_and_the_others_run(install_suites, ejkernel, tmp_path):
    install_suites("third-party", fails="third_party_suites:fail", rows="third_party_suites:add_rows")
    file = tmp_path / "reports.json"
    code, _, error = ejkernel("bench", "fails", "rows", "--json", str(file))
    assert code == 1
    assert error == "ejkernel: fails failed: ZeroDivisionError: division by zero (--debug shows where)\n"
    assert [report["benchmark"] for report in json.loads(file.read_text())] == ["rows"]


SVG = "{http://www.w3.org/2000/svg}"


def test_what_is_measured_before_the_end_is_shown(install_suites, ejkernel, tmp_path):
    install_suites("bench-ended", ended="third_party_suites:be_ended", nothing="third_party_suites")
    file = tmp_path / "report.json"
    handler = signal.getsignal(signal.SIGTERM)
    code, output, _ = ejkernel("bench", "ended", "nothing", "--json", str(file))
    assert code == 130
    assert (
        "interrupted; the rest was not measured\n\nmilliseconds\n         ours  theirs\n  first     1       2\n"
        in output
    )
    assert "  second" not in output
    assert "of nothing" not in output  # the suites behind it do not run
    (report,) = json.loads(file.read_text())
    assert report["tables"][0]["rows"] == [["first", 1.0, 2.0]]
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_picture_has_every_case_with_its_contenders(install_suites, ejkernel, tmp_path, suffix):
    install_suites("third-party", rows="third_party_suites:add_rows")
    picture = tmp_path / f"rows.{suffix}"
    code, output, _ = ejkernel("bench", "rows", "--picture", str(picture))
    assert code == 0
    assert output.endswith(f"picture: {picture}\n")
    signatures = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert picture.read_bytes().startswith(signatures[suffix])
    if suffix == "svg":
        texts = [element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")]
        for text in ("first", "second", " ours 1", " theirs 2", " ours 3"):
            assert texts.count(text) == 1
        assert not [text for text in texts if "theirs 0" in text]  # it does not take the second case


ROWS_IN_A_PIPE = """
import sys
from ejkernel_bench.suite import Report, Rows
from ejkernel_cli import main

class Point:  # an entry point of a suite that goes on only when its row has been read
    group, name, value, dist = "ejkernel.benchmarks", "slow", "slow", None
    def load(self):
        return run

def run():
    \"\"\"Slow.\"\"\"
    rows = Rows("milliseconds", ("", "ours"), series=("ours",))
    for number in range(3):
        rows.add(f"case {number}", number)
        assert sys.stdin.readline() == f"read {number}\\n"
    return Report("slow", [rows.table()])

from importlib import metadata
points = metadata.entry_points
metadata.entry_points = lambda **params: [Point()] if params.get("group") == Point.group else points(**params)
main(["bench", "slow"])
"""


def test_each_row_is_in_the_pipe_before_the_next_is_measured():
    process = subprocess.Popen(
        [sys.executable, "-c", ROWS_IN_A_PIPE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        for number in range(3):  # without the row, the suite waits for ever, and so does this until it is killed
            while (line := process.stdout.readline()) != f"  case {number}: ours {number}\n":
                assert line, "the pipe was closed"
            process.stdin.write(f"read {number}\n")
            process.stdin.flush()
        output, _ = process.communicate(timeout=60)
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode == 0
    assert [line.split() for line in output.splitlines() if line.startswith("  case")] == [
        ["case", str(number), str(number)] for number in range(3)
    ]


# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demonstration, "SIZES", {"cpu": self_attention(1, 64, 2, 16)})
    monkeypatch.setattr(demonstration.jax, "default_backend", lambda: "cpu")


def test_run_says_what_is_installed_chosen_right_and_fast(tiny, ejkernel, tmp_path):
    file, picture = tmp_path / "report.json", tmp_path / "run.svg"
    code, output, error = ejkernel("run", "--rounds", "1", "--json", str(file), "--picture", str(picture))
    assert (code, error) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("ejkernel-core 0.1.0, jax 0.")
    assert lines[1].startswith("plugins: ")
    assert any(line.startswith("device: cpu") for line in lines[2:5])
    steps = [line.partition("  ")[0] for line in lines if line[:2] in ("1/", "2/", "3/", "4/", "5/")]
    assert steps == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert "right: every error is below what is allowed" in output
    assert lines[-1] == f"picture: {picture}"
    assert max(map(len, lines[:-1])) <= 100
    (report,) = json.loads(file.read_text())
    assert report["benchmark"] == "flash_attention B1 S64 H2 D16 float32 causal"
    assert [row[0] for row in report["tables"][0]["rows"]] == ["out", "d_query", "d_key", "d_value"]
    texts = [element.text or "" for element in ElementTree.parse(picture).iter(f"{SVG}text")]
    for contender in ("ejkernel", "jax.nn"):
        assert sum(text.startswith(f" {contender} ") for text in texts) == 2  # in both passes


def test_run_by_a_backend_and_by_one_that_does_not_exist(tiny, ejkernel):
    code, output, _ = ejkernel("run", "--rounds", "1", "--backend", "reference")
    assert code == 0
    assert "flash_attention: reference, " in output
    code, _, error = ejkernel("run", "--backend", "refrence")
    assert code == 1
    assert "refrence" in error
    assert error.count("\n") == 1


def test_run_fails_where_a_result_is_wrong(tiny, ejkernel, monkeypatch):
    monkeypatch.setattr(demonstration, "tolerance_of", lambda example: 0.0)
    code, output, _ = ejkernel("run", "--rounds", "1")
    assert code == 1
    assert "WRONG: out" in output


def test_every_suite_of_this_package_returns_a_report():
    for entry_point in distribution("ejkernel-bench").entry_points:
        if entry_point.group == GROUP:
            annotation = inspect.signature(entry_point.load().run).return_annotation
            assert annotation.removeprefix("suite.") == Report.__name__


def test_the_subcommands_are_commands_that_import_no_jax():
    points = {point.name: point for point in entry_points(group="ejkernel.commands")}
    assert {"bench", "records", "run"} <= {*points}
    for name in ("bench", "records", "run"):
        assert isinstance(points[name].load(), click.Command)
    program = (
        "import sys; from ejkernel_cli import main\ntry: main(sys.argv[1:])\nfinally: assert 'jax' not in sys.modules"
    )
    for name in ("bench", "records", "run"):
        process = subprocess.run(
            [sys.executable, "-c", program, name, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout.startswith(f"Usage: ejkernel {name}")


FUSIONS = "--xla_cpu_experimental_ynn_fusion_type="


@pytest.mark.parametrize(
    ("jaxlib", "flags", "expected"),
    [
        ("0.10.2", None, FUSIONS),
        ("0.10.2", "--xla_dump_to=/x", f"{FUSIONS} --xla_dump_to=/x"),
        ("0.10.2", f"--xla_dump_to=/x {FUSIONS}", None),
        ("0.11.2", None, None),
    ],
)
def test_run_sets_the_flag_that_jaxlib_needs_for_right_sums(monkeypatch, jaxlib, flags, expected):
    monkeypatch.setattr(_findings, "version", lambda name: jaxlib)
    environment = {} if flags is None else {"XLA_FLAGS": flags}
    lines = [*run.set_fusion_flag(environment)]
    if expected is None:
        assert (environment.get("XLA_FLAGS"), lines) == (flags, [])
    else:
        assert environment["XLA_FLAGS"] == expected
        assert lines[-1] == f'for other programs: export XLA_FLAGS="{FUSIONS} $XLA_FLAGS"'
