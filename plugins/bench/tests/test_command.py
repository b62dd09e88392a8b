"""``python -m ejkernel_bench`` and its entry points: suites of any distribution, and broken ones."""

from __future__ import annotations

import inspect
import json
import sys
from importlib.metadata import distribution, entry_points

import pytest

from ejkernel_bench import __main__ as command
from ejkernel_bench import run
from ejkernel_bench._report import Report
from ejkernel_bench._suites import GROUP, BrokenSuite, suites
from ejkernel_ops.flash_attention.sizes import self_attention

MODULE = '''
"""How fast nothing is.

More.
"""

from ejkernel_bench.suite import Report

def run(rounds=1):
    return Report("nothing", (), text=f"{rounds} rounds of nothing")

def measure(backend=None):
    """A function as a suite."""
    return Report("function", (), faults=["wrong"])
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


def descriptions_from_command(capsys):
    assert command.main([]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_without_a_name_it_lists_every_suite_with_a_description(capsys):
    descriptions = descriptions_from_command(capsys)
    names = {
        entry_point.name for entry_point in distribution("ejkernel-bench").entry_points if entry_point.group == GROUP
    }
    assert names <= {*descriptions}
    assert names >= {"run", "overhead", "path", "flash_attention", "hopper", "shapes", "choice", "memory", "packed"}
    assert not any("BROKEN" in descriptions[name] for name in names)
    assert descriptions["attention"] == "Attention against jax.nn.dot_product_attention, S 4096, causal and full"


def test_a_distribution_adds_suites(install_suites, capsys):
    install_suites("third-party", nothing="third_party_suites", function="third_party_suites:measure")
    descriptions = descriptions_from_command(capsys)
    assert descriptions["nothing"] == "How fast nothing is"
    assert descriptions["function"] == "A function as a suite"
    assert command.main(["nothing", "--rounds", "3"]) == 0
    assert "3 rounds of nothing" in capsys.readouterr().out
    assert command.main(["function"]) == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("third_party_suites:absent", "cannot be imported: AttributeError:"),
        ("json", "is no module with a function 'run', and no function"),
    ],
)
def test_a_broken_suite_is_reported_by_name_and_distribution_and_the_others_run(install_suites, capsys, value, reason):
    install_suites("third-party", nothing="third_party_suites", broken=value)
    assert descriptions_from_command(capsys)["broken"].startswith(
        f"BROKEN: 'broken' of third-party 1.0 ({value}) {reason}"
    )
    assert command.main(["broken", "nothing"]) == 1
    output = capsys.readouterr()
    assert "1 rounds of nothing" in output.out
    assert f"BROKEN: 'broken' of third-party 1.0 ({value}) {reason}" in output.err


def test_a_name_of_two_distributions_is_broken(install_suites, capsys):
    install_suites("third-party", nothing="third_party_suites")
    install_suites("fourth-party", nothing="third_party_suites:measure")
    with pytest.raises(BrokenSuite, match="'nothing' is claimed by"):
        suites()["nothing"].load()
    assert {"third-party 1.0 (third_party_suites)", "fourth-party 1.0 (third_party_suites:measure)"} <= {
        part.removeprefix("'nothing' is claimed by ").strip()
        for part in descriptions_from_command(capsys)["nothing"].removeprefix("BROKEN: ").split(";")[0].split(" and ")
    }


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        command.main(["atention"])
    assert "no benchmark is called atention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["path", "--rounds", "3"], "path counts the same every time; --rounds is for suites that take time"),
        (["path", "--peers"], "path always has its peers"),
        (["overhead", "--small"], "overhead has one set of sizes"),
    ],
)
def test_an_option_without_effect_is_refused(arguments, message):
    with pytest.raises(SystemExit, match=message):
        command.main(arguments)


def test_the_command_runs_a_suite_prints_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "SIZES", dict.fromkeys(("cpu", "gpu", "tpu"), self_attention(1, 64, 2, 16)))
    file = tmp_path / "reports.json"
    assert command.main(["run", "--rounds", "1", "--backend", "reference", "--json", str(file)]) == 0
    assert "backend='reference' was asked for" in capsys.readouterr().out
    (report,) = json.loads(file.read_text())
    assert report["benchmark"] == "run"
    assert [row[0] for row in report["tables"][0]["rows"]] == ["out", "d_query", "d_key", "d_value"]


def test_every_suite_of_this_package_returns_a_report():
    for entry_point in distribution("ejkernel-bench").entry_points:
        if entry_point.group == GROUP:
            annotation = inspect.signature(entry_point.load().run).return_annotation
            assert annotation.removeprefix("suite.") == Report.__name__


def test_the_commands_are_functions_of_arguments(capsys):
    commands = {entry_point.name: entry_point.load() for entry_point in entry_points(group="ejkernel.commands")}
    assert {"bench", "records"} <= {*commands}
    assert commands["bench"]([]) == 0
    assert "flash_attention" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        commands["records"](["--help"])
    assert "folder" in capsys.readouterr().out
