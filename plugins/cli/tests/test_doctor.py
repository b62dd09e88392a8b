"""``ejkernel doctor``: what it finds, and that it goes on where JAX does not."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import jax
import pytest

import ejkernel_cli
import ejkernel_core
from ejkernel_cli import _findings, _metadata
from ejkernel_cli._findings import BROKEN, NOTE, OK, Finding
from ejkernel_core import Provenance, Record
from ejkernel_core.extend import device_name

FLAG = "--xla_cpu_experimental_ynn_fusion_type="


def findings(process) -> dict[str, dict[str, dict[str, str]]]:
    """By heading and subject."""
    groups = json.loads(process.stdout)
    return {name: {f["subject"]: f for f in group} for name, group in groups.items() if name != "broken"}


def broken(process) -> set[str]:
    return {f["subject"] for group in findings(process).values() for f in group.values() if f["status"] == BROKEN}


def test_a_good_installation_has_the_device_the_versions_and_no_fault(run_process, tmp_path):
    process = run_process("doctor", "--json", XLA_FLAGS=FLAG)
    groups = findings(process)
    # Commands of other distributions are theirs to prove.
    assert {subject for subject in broken(process) if not subject.startswith("ejkernel ")} == set()
    assert device_name(jax.devices("cpu")[0]) in groups["devices"]["cpu"]["text"]
    assert groups["software"]["jax"]["text"] == metadata.version("jax")
    assert groups["distributions"]["ejkernel-cli"] == {
        "subject": "ejkernel-cli",
        "status": OK,
        "text": metadata.version("ejkernel-cli"),
        "advice": "",
    }
    assert "XLA_FLAGS" not in groups["devices"]
    assert groups["cache"]["cache"]["text"] == f"{tmp_path / 'configs'}, which is made when there is something to store"
    assert groups["environment"]["EJKERNEL_CACHE_DIR"]["text"] == repr(str(tmp_path / "configs"))


@pytest.mark.long
def test_the_text_has_the_lines_to_copy(run_process, install):
    path = install("bad-dist", {"bad": "1/0"}, kernels={"rms_norm.bad": "bad"})
    process = run_process("doctor", path=path, EJKERNEL_AUTOTNUE="on_miss")
    assert process.returncode == 1
    lines = process.stdout.splitlines()
    assert "  rms_norm.bad: pip uninstall bad-dist, or export EJKERNEL_PLUGINS=-bad-dist" in lines
    assert "  EJKERNEL_AUTOTNUE: unset EJKERNEL_AUTOTNUE; the name is EJKERNEL_AUTOTUNE" in lines
    assert lines[-1].endswith(" broken")
    start = lines.index("What to do:")
    assert max(map(len, lines[:start])) <= 80


@pytest.mark.long
def test_a_broken_plugin_is_found_with_its_reason(run_process, install):
    path = install("bad-dist", {"bad": "1/0"}, kernels={"rms_norm.bad": "bad"}, commands={"worse": "bad:command"})
    process = run_process("doctor", "--json", path=path)
    groups = findings(process)
    assert process.returncode == 1
    assert "bad-dist 1.0 (bad) does not load: ZeroDivisionError" in groups["plugins"]["rms_norm.bad"]["text"]
    assert "cannot be imported: ZeroDivisionError" in groups["commands"]["ejkernel worse"]["text"]


def test_a_subcommand_that_two_distributions_claim_is_found(monkeypatch):
    points = [metadata.EntryPoint("same", f"{name}:command", _metadata.COMMANDS) for name in ("one", "other")]
    monkeypatch.setattr(_findings, "entry_points", lambda group: tuple(points))
    (finding,) = _findings.commands()
    assert (finding.subject, finding.status) == ("ejkernel same", BROKEN)
    assert "(one:command) and " in finding.text
    assert "(other:command)" in finding.text


def test_a_plugin_that_two_distributions_claim_is_one_finding(install, monkeypatch):
    for name in ("p-one", "p-two"):
        monkeypatch.syspath_prepend(install(name, {}, kernels={"rms_norm.same": f"{name[2:]}_module"}))
    findings = [*_findings.plugins(_findings.Machine((), ejkernel_core.Registry()))]
    (broken,) = [finding for finding in findings if finding.status == BROKEN]
    assert broken.subject == "rms_norm.same"
    assert broken.advice in ("uninstall p-one or p-two", "uninstall p-two or p-one")
    assert "p-one 1.0 (one_module)" in broken.text
    assert "p-two 1.0 (two_module)" in broken.text
    usable, _, count, *_ = findings[-1].text.split()
    assert int(usable) == int(count) - 1


@pytest.mark.long
def test_it_goes_on_without_jax(run_process, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "jax.py").write_text("raise ImportError('libjax.so is missing')\n")
    process = run_process("doctor", "--json", path=str(tmp_path / "broken"))
    groups = findings(process)
    assert (process.returncode, process.stderr) == (1, "")
    assert groups["devices"]["jax"]["text"].endswith("cannot be imported: ImportError: libjax.so is missing")
    assert groups["distributions"]["ejkernel-ops"]["status"] == OK
    assert groups["cache"]["cache"]["status"] == OK


@pytest.mark.long
def test_it_goes_on_without_a_device_and_names_every_fault_of_the_environment(run_process):
    variables = {"JAX_PLATFORMS": "cuda", "EJKERNEL_PLUGINS": "zzz", "EJKERNEL_CACHEDIR": "x", "EJKERNEL_ZZZ": "1"}
    process = run_process("doctor", "--json", **variables)
    groups = findings(process)
    assert process.returncode == 1
    assert groups["devices"]["devices"]["advice"] == "unset JAX_PLATFORMS, which is 'cuda'"
    assert groups["environment"]["EJKERNEL_PLUGINS"]["status"] == BROKEN
    assert groups["environment"]["EJKERNEL_CACHEDIR"]["advice"].endswith("the name is EJKERNEL_CACHE_DIR")
    assert groups["environment"]["EJKERNEL_ZZZ"]["status"] == NOTE


# -- one examination at a time -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("EJKERNEL_PLUGINS", raising=False)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "configs"))
    return tmp_path / "configs"


def test_a_folder_that_cannot_be_used_is_broken(folder, monkeypatch):
    folder.write_text("a file")
    (finding,) = _findings.cache()
    assert (finding.status, finding.advice) == (BROKEN, "set EJKERNEL_CACHE_DIR to a folder that can be written to")
    assert finding.text == f"{folder} cannot be used: {folder}: Not a directory"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "/proc/self/configs")  # nobody can write there, not even root
    (finding,) = _findings.cache()
    assert finding.status == BROKEN


def test_a_folder_on_a_full_disk_is_broken(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(_findings.tempfile, "TemporaryFile", lambda dir: Path("/dev/full").open("wb"))  # noqa: SIM115
    (finding,) = _findings.cache()
    assert (finding.status, finding.text) == (BROKEN, f"{folder} cannot be used: {folder}: No space left on device")


def test_the_folder_is_that_of_the_cache(folder, monkeypatch):
    from ejkernel_cache import PersistentCache

    assert _findings.cache_folder() == PersistentCache().path == folder
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    assert _findings.cache_folder() == PersistentCache().path != folder


def test_damaged_files_are_counted(folder):
    (folder / ".damaged").mkdir(parents=True)
    assert [f.status for f in _findings.cache()] == [OK]
    (folder / ".damaged" / "a.json").write_text("")
    assert "with 1 damaged file that was moved" in next(_findings.cache()).text


def test_distributions_of_other_versions_are_broken(monkeypatch):
    versions = {"ejkernel-core": "2.0", "ejkernel-ops": "1.0", "ejkernel-xla": "2.0", "jax": "1.0"}
    monkeypatch.setattr(_findings, "version", versions.get)
    monkeypatch.setattr(_findings, "_family", lambda: ["ejkernel-ops", "ejkernel-xla"])
    monkeypatch.setattr(metadata, "requires", lambda name: ["ejkernel-core>=0.1", "absent>=3", "sun; extra == 'all'"])
    other, incomplete = _findings.distributions()
    assert other == Finding(
        "ejkernel-ops",
        BROKEN,
        "1.0, and ejkernel-core has 2.0; all are released together",
        "pip install -U ejkernel-core ejkernel-ops",
    )
    assert (incomplete.status, incomplete.advice) == (BROKEN, "pip install absent")


@pytest.mark.parametrize("file", ["METADATA", "entry_points.txt"])
def test_a_distribution_with_damaged_files_is_named_and_the_others_are_listed(run, install, monkeypatch, file):
    path = install("bad-dist", {}, kernels={"rms_norm.bad": "bad"})
    folder = Path(path, "bad_dist-1.0.dist-info")
    (folder / file).write_bytes(b"\xff\xfe")
    process = run("list", path=path)
    assert process.returncode == 0
    assert "flash_attention" in process.stdout
    if file == "entry_points.txt":
        assert process.stderr.startswith(f"ejkernel: warning: {folder} is left out: UnicodeDecodeError: ")
        assert process.stderr.count("\n") == 1
    monkeypatch.syspath_prepend(path)
    (finding,) = [finding for finding in _findings.distributions() if finding.status == BROKEN]
    assert finding.subject == str(folder)
    assert finding.text.startswith("cannot be read: UnicodeDecodeError: ")


@pytest.mark.parametrize(
    ("jaxlib", "platform", "value", "is_found"),
    [
        ("0.10.2", "cpu", "", True),
        ("0.10.2", "cpu", f"{FLAG}x", True),
        ("0.10.2", "cpu", f"--a {FLAG} --b", False),
        ("0.10.2", "gpu", "", False),
        ("0.11.0", "cpu", "", False),
    ],
)
def test_the_flag_of_jaxlib_0_10_is_missed_on_a_cpu_only(monkeypatch, jaxlib, platform, value, is_found):
    monkeypatch.setattr(_findings, "version", {"jaxlib": jaxlib}.get)
    monkeypatch.setenv("XLA_FLAGS", value)

    class Device:
        pass

    Device.platform = platform
    subjects = [f.subject for f in _findings.flags(_findings.Machine((Device(),)))]
    assert subjects == (["XLA_FLAGS"] if is_found else [])


def test_records_of_packages_are_counted(folder):
    assert _findings._package_counts("NVIDIA H200")["ejkernel-tuned"] > 100
    assert set(_findings._package_counts("my cpu, 2 cores").values()) == {0}


def test_records_of_the_cache_count_where_they_are_of_the_kernels_here(folder):
    from ejkernel_cache import PersistentCache

    def store(rows, backend, **software):
        x = jax.ShapeDtypeStruct((rows, 8), "float32")
        plan = registry.plan("rms_norm", x, backend="reference")
        versions = {**plan.kernel.software, **software}
        provenance = Provenance(
            when="2026-01-01T00:00:00+00:00", device="a cpu", milliseconds=1.0, backends=(backend,), software=versions
        )
        PersistentCache().put(plan.invocation.key, Record(plan.cfg, backend, provenance))
        return plan.invocation.key

    registry = ejkernel_core.registry
    device = store(3, "reference").device
    assert _findings._cache_counts(device, registry) == (1, 0)
    store(3000, "reference", jax="0.1")
    store(30000, "absent")
    (folder / "damaged.json").write_text("{")
    assert _findings._cache_counts(device, registry) == (1, 2)
    assert _findings._cache_counts("another cpu", registry) == (0, 0)
    answering, old = _findings._records(device, registry)
    assert (answering.status, answering.text) == (OK, f"for {device}: 1 in the cache")
    assert old.text == "2 in the cache, of other versions or absent kernels: they are not used"


def test_what_is_absent_for_the_platform_is_advised(monkeypatch):
    extras = {"cpu": ("ejkernel-ops",), "cuda": ("ejkernel-ops", "ejkernel-sun", "ejkernel-moon")}
    monkeypatch.setattr(_metadata, "extras", lambda: extras)

    class Gpu:
        platform = device_kind = "gpu"

    finding = next(_findings.speed(_findings.Machine((Gpu(),))))
    assert finding.text == "not installed: ejkernel-sun, ejkernel-moon"
    assert finding.advice == 'pip install "ejkernel-core[cuda]"'


def test_an_examination_that_fails_is_a_finding():
    def examination():
        yield Finding("a", OK, "")
        raise KeyError("boom")

    assert _findings._findings("cache", examination) == [
        Finding("cache", BROKEN, "could not be examined: KeyError: 'boom'")
    ]


def test_the_public_names_are_there():
    assert all(hasattr(ejkernel_cli, name) for name in ejkernel_cli.__all__)
