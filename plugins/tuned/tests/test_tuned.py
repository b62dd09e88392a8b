"""The records are one policy. Beside the distributions that had them before, it names these, and all answer."""

from __future__ import annotations

import shutil
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

import attrs
import pytest

import ejkernel_tuned
from ejkernel_bench.records import calls_of
from ejkernel_core import Choice, Registry
from ejkernel_core.extend import EMPTY, Selection, ask_policies
from ejkernel_ops.flash_attention.sizes import self_attention
from tests.distributions import MakeDistribution

KERNELS = "ejkernel-ops,ejkernel-xla,ejkernel-cudnn,ejkernel-triton"


@pytest.fixture
def former(distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs what had the records of the H200 before, with the same records."""
    policies = {"tuned_h200": "ejkernel_tuned_h200:records"}
    package = distribution("ejkernel-tuned-h200", {}, policies=policies) / "ejkernel_tuned_h200"
    shutil.copytree(Path(ejkernel_tuned.__file__).parent / "NVIDIA%20H200", package / "NVIDIA%20H200")
    code = 'from ejkernel_cache import PackagedRecords\nrecords = PackagedRecords("ejkernel_tuned_h200")\n'
    (package / "__init__.py").write_text(code)
    monkeypatch.setitem(sys.modules, "ejkernel_tuned_h200", None)  # so that the module goes with the test
    del sys.modules["ejkernel_tuned_h200"]


def warnings_of_choices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of a process that has not imported the records before."""
    monkeypatch.delitem(sys.modules, "ejkernel_tuned")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            choice_on_h200("ejkernel-tuned")
    return [str(warning.message) for warning in caught]


def choice_on_h200(*distributions: str) -> tuple[Choice | None, list[str]]:
    """What the policies of these distributions choose for a call that was measured, and which of them are broken."""
    registry = Registry(plugins=",".join([KERNELS, *distributions]))
    (inv, _) = calls_of(self_attention(4, 4096, 16, 128, "bfloat16"))
    inv = attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))
    candidates, _ = registry.candidates(inv)
    policies = registry.policies(EMPTY)
    choice, _, verdicts = ask_policies(Selection(inv, policies, EMPTY), candidates)
    return choice, [verdict.name for verdict in (*policies.verdicts, *verdicts)]


def test_the_records_are_an_installed_policy() -> None:
    (entry_point,) = entry_points(group="ejkernel.policies", name="tuned")
    assert entry_point.load() is ejkernel_tuned.records


def test_each_card_has_a_folder() -> None:
    folders = {file.parent.name for file in Path(ejkernel_tuned.__file__).parent.rglob("*.jsonl")}
    assert folders == {"NVIDIA%20H200", "NVIDIA%20H100%2080GB%20HBM3"}


def test_alone_it_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of_choices(monkeypatch) == []


def test_a_former_distribution_is_named_once_with_the_command_that_removes_it(
    former: None, distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warnings_of_choices(monkeypatch) == [
        "ejkernel-tuned has the records of ejkernel-tuned-h200, which can go: pip uninstall ejkernel-tuned-h200"
    ]
    distribution("ejkernel-tuned-h100", {})
    (text,) = warnings_of_choices(monkeypatch)
    assert text.endswith("which can go: pip uninstall ejkernel-tuned-h100 ejkernel-tuned-h200")


@pytest.mark.usefixtures("all_compilers", "former")
def test_the_records_of_a_former_distribution_answer_still() -> None:
    former, broken = choice_on_h200("ejkernel-tuned-h200")
    assert broken == []
    assert former.origin == "packaged records (ejkernel_tuned_h200)"
    current, _ = choice_on_h200("ejkernel-tuned")
    assert current.origin == "packaged records (ejkernel_tuned)"
    both, broken = choice_on_h200("ejkernel-tuned", "ejkernel-tuned-h200")
    assert broken == []
    assert {(one.backend, one.cfg, one.distance) for one in (former, current, both)} == {
        (current.backend, current.cfg, 0)
    }


@pytest.mark.usefixtures("all_compilers", "former")
def test_where_warnings_are_errors_the_former_records_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ejkernel_tuned")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice, broken = choice_on_h200("ejkernel-tuned", "ejkernel-tuned-h200")
    assert choice.origin == "packaged records (ejkernel_tuned_h200)"
    assert broken == ["tuned"]
