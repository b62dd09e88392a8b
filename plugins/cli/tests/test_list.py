"""``ejkernel list``, from metadata and on this machine."""

from __future__ import annotations

import json

import pytest

from ejkernel_cli import _metadata
from ejkernel_core import _discovery


def test_operations_have_their_backends_and_these_their_distributions(run):
    listing = json.loads(run("list", "--json").stdout)
    assert listing["operations"]["rms_norm"].startswith("ejkernel-ops ")
    kernels = {(row["operation"], row["backend"]): row["distribution"].split()[0] for row in listing["kernels"]}
    assert kernels["flash_attention", "gluon_sm90"] == "ejkernel-triton"
    assert kernels["rms_norm_bwd", "reference"] == "ejkernel-ops"
    assert listing["policies"]["cache"].startswith("ejkernel-cache ")
    assert {"explain", "list"} <= listing["commands"].keys()
    assert "rms_norm" in listing["benchmarks"]


def test_the_table_has_the_same_within_80_columns(run):
    process = run("list")
    lines = process.stdout.splitlines()
    assert (process.returncode, process.stderr) == (0, "")
    assert max(map(len, lines)) <= 80
    assert "moe_route                    ejkernel-ops       reference, triton, xla" in lines
    assert any(line.split()[:2] == ["cudnn", "ejkernel-cudnn"] for line in lines)
    assert lines[-1] == "'ejkernel list --here' shows what runs on this machine"


def test_a_pipe_has_the_columns_that_it_is_given(run):
    wide = run("list", COLUMNS="200").stdout.splitlines()
    assert any(line.endswith("cudnn, gluon_sm90, pallas_tpu, reference, triton, xla") for line in wide)
    assert max(map(len, run("list", COLUMNS="60").stdout.splitlines())) <= 60


def test_a_selection_is_obeyed_and_named(run):
    process = run("list", EJKERNEL_PLUGINS="-ejkernel-triton,-ejkernel-cudnn")
    assert process.stdout.startswith("EJKERNEL_PLUGINS='-ejkernel-triton,-ejkernel-cudnn' selects these plugins:\n")
    rest = process.stdout.partition("\n")[2].partition("\ncommands")[0]  # they are not plugins
    assert "triton" not in rest
    assert "cudnn" not in rest
    assert "pallas_tpu" in rest
    nothing = run("list", EJKERNEL_PLUGINS="")
    assert 'no operations; pip install "ejkernel-core[cpu]"' in nothing.stdout
    assert json.loads(run("list", "--json", EJKERNEL_PLUGINS="").stdout)["kernels"] == []


@pytest.mark.parametrize("here", [(), ("--here",)], ids=["metadata", "here"])
def test_a_selection_of_what_is_not_installed_is_refused(run, here):
    process = run("list", *here, EJKERNEL_PLUGINS="-ejkernel-opps")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == (
        "ejkernel: EJKERNEL_PLUGINS takes names of installed distributions, with or without '-'; got '-ejkernel-opps'\n"
    )


@pytest.mark.parametrize(
    "words", [None, "", "ejkernel-ops", "Ejkernel_Ops, ejkernel-xla", "-ejkernel-ops", "-ejkernel-xla,ejkernel-ops,"]
)
def test_a_selection_means_what_it_means_to_the_core(words):
    for point in _metadata.entry_points(_metadata.KERNELS):
        entry = _discovery.PluginEntry(_metadata.KERNELS, point.name, point.value, point)
        is_selected = _metadata.is_selected(_metadata.distribution(point), words)
        assert is_selected == _discovery._is_selected(entry, words), (point.name, words)


def test_the_extras_are_those_of_the_core():
    assert _metadata.extras() == _discovery.extras() != {}


def test_here_shows_ranks_and_what_runs_elsewhere(run_process):
    listing = json.loads(run_process("list", "--here", "--json", EJKERNEL_PLUGINS="-ejkernel-triton").stdout)
    rows = {(row["operation"], row["backend"]): row for row in listing["kernels"]}
    assert listing["platform"] == "cpu"
    assert (rows["flash_attention", "xla"]["status"], rows["flash_attention", "xla"]["rank"]) == ("runs", 10)
    assert (rows["flash_attention", "cudnn"]["status"], rows["flash_attention", "cudnn"]["reason"]) == (
        "not here",
        "runs on gpu",
    )
    assert rows["flash_attention", "triton"]["status"] == "not selected"


NEEDY = """
from ejkernel_core import Unsupported, hookimpl

@hookimpl
def heuristic_cfg(inv):
    raise Unsupported("it needs the sun: pip install sun")

@hookimpl
def run_backend(inv, cfg): ...
"""


@pytest.mark.long
def test_here_shows_what_is_broken_and_what_is_missing(run_process, install):
    kernels = {"rms_norm.bad": "bad", "rms_norm.needy": "needy"}
    path = install("bad-dist", {"bad": "1/0", "needy": NEEDY}, kernels=kernels, policies={"worse": "bad"})
    process = run_process("list", "--here", "--json", path=path)
    listing = json.loads(process.stdout)
    rows = {row["backend"]: row for row in listing["kernels"] if row["distribution"] == "bad-dist"}
    assert rows["bad"]["status"] == "broken"
    assert "ZeroDivisionError: division by zero" in rows["bad"]["reason"]
    assert (rows["needy"]["status"], rows["needy"]["reason"]) == ("needs", "it needs the sun: pip install sun")
    assert [*listing["broken"]] == ["'worse' of bad-dist 1.0 (bad)"]


@pytest.mark.long
def test_here_without_a_device_says_so_in_one_line(run_process):
    process = run_process("list", "--here", JAX_PLATFORMS="cuda")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("ejkernel: JAX has no device: JAX_PLATFORMS is 'cuda', and it cannot start that")
    assert process.stderr.count("\n") == 1
