"""The lock of device code: records of a kernel are not used with other code unless somebody has decided so."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "device_code", Path(__file__).parents[1] / ".ci/device_code.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_nobody_has_to_decide_on_device_code(lock: ModuleType) -> None:
    assert not (text := lock.fault(lock.recorded(), lock.current())), text


def test_every_kernel_that_launches_something_is_in_it(lock: ModuleType) -> None:
    """One without configurations calls other kernels."""
    points = [p for p in entry_points(group="ejkernel.kernels") if p.module.partition(".")[0] in lock.PACKAGES]
    assert {p.name for p in points if hasattr(p.load(), "config_space")} == lock.current().keys()


def test_changed_code_asks_for_a_decision(lock: ModuleType) -> None:
    recorded = {"add.triton": ("a", 1), "add.pallas_tpu": ("b", 1)}
    text = lock.fault(recorded, {**recorded, "add.triton": ("c", 1)})
    assert text.startswith(
        "the device code of add.triton changed. If results or speed may differ, raise VERSION by one"
    )
    assert text.endswith("stand, confirm: .venv/bin/python .ci/device_code.py --confirm")
    raised = lock.fault(recorded, {**recorded, "add.triton": ("c", 2)})
    assert raised == "tests/device-code.json is old: .venv/bin/python .ci/device_code.py --confirm"
    assert lock.fault(recorded, recorded) == ""


@pytest.mark.parametrize(
    ("kernel", "modules"),
    [
        ("ejkernel_triton.norms.kernels", {"norms._backward", "norms._forward", "norms._quantized"}),  # "_forward:f"
        ("ejkernel_triton.flash_attention", {"flash_attention._forward"}),  # by the full name
        ("ejkernel_triton.moe_order", {"moe_order._kernels", "moe_route._kernels"}),  # by another module's function
        ("ejkernel_pallas_tpu.norms.kernels", {"norms._backward", "norms._forward"}),  # imported in a function
        ("ejkernel_triton.grouped_matmul.backward", set()),  # it calls other kernels
    ],
)
def test_device_code_is_found_by_its_launches(lock: ModuleType, kernel: str, modules: set[str]) -> None:
    assert {module.partition(".")[2] for module in lock.device_modules(kernel)} == modules
