"""The proofs in another project, with plain pytest and one CPU device, and the fields of the proofs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_core import Example, Operation, Registry, Unsupported, hookimpl
from ejkernel_core.environment import lacks_fusion_flag
from ejkernel_testing import _checks, _processes, _proofs
from ejkernel_testing._double import double

PROJECT = """
from types import SimpleNamespace

import numpy as np

from ejkernel_core import Example, Operation, Registry, Unsupported, hookimpl
from ejkernel_testing import KernelProofs


def kernel(compute):
    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return compute(inv["x"])

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def examples():
    def arguments(draw):
        return {"x": np.random.default_rng(draw).standard_normal((8, 3))}

    return [Example("rows", "double", arguments, wrt=("x",), checks={"shard_map"}, batched=("x",))]


REGISTRY = Registry(plugins="")
REGISTRY.register(Operation(name="double", signature=lambda x: None, examples=examples))
REGISTRY.register(kernel(lambda x: 2 * x), "double.reference")
REGISTRY.register(kernel(lambda x: 2 * x), "double.right")
REGISTRY.register(kernel(lambda x: 2 * x if len(x) == 8 else 3 * x), "double.wrong_on_a_shard")


class TestRight(KernelProofs):
    kernel = "double.right"
    registry = REGISTRY


class TestWrong(KernelProofs):
    kernel = "double.wrong_on_a_shard"
    registry = REGISTRY
"""


SKIPPED = "<testsuites><testsuite><testcase><skipped/></testcase></testsuite></testsuites>"


def output_of_proofs(folder: Path, **environment: str) -> str:
    """The output of plain pytest in the project."""
    (folder / "deep").mkdir()
    (folder / "deep" / "test_double.py").write_text(PROJECT)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q --import-mode=importlib --strict-markers\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    process = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-k", "transforms", "deep"],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout


@pytest.mark.parametrize(
    "environment",
    [pytest.param({}, marks=pytest.mark.long), {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}],
    ids=str,
)
def test_a_kernel_that_is_wrong_on_a_shard_only_fails(tmp_path: Path, environment: dict[str, str]) -> None:
    output = output_of_proofs(tmp_path, **environment)
    assert re.search(r"transforms: shard_map: double.wrong_on_a_shard on rows: \S+ is off by", output), output
    assert "1 failed, 1 passed" in output
    assert ("in a process with 8 devices" in output) is (not environment)
    assert ("export XLA_FLAGS=" in output) is lacks_fusion_flag(environment, jaxlib.__version__)


@pytest.mark.long
def test_sharding_fails_if_the_user_has_set_one_device(tmp_path: Path) -> None:
    output = output_of_proofs(tmp_path, JAX_NUM_CPU_DEVICES="1")
    assert "there is one device, so nothing can be sharded: set JAX_NUM_CPU_DEVICES=8" in output, output
    assert "2 failed" in output


def test_the_check_outside_of_pytest_fails_with_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    registry, kernel, example = double()
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    with pytest.raises(AssertionError, match=r"^transforms: shard_map: double.plain on ones: there is one device"):
        testing.transforms(registry, kernel, example, "shard_map")


def test_sharding_is_skipped_on_one_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    import jax

    class Proofs(testing.KernelProofs):
        registry, kernel, example = double()

    example = attrs.evolve(Proofs.example, batched=("x",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    with pytest.raises(pytest.skip.Exception, match="there is one device"):
        Proofs().test_transforms(example, "sharding", request)
    Proofs().test_transforms(example, "shard_map", request)  # over one device


@pytest.mark.parametrize(
    ("status", "report"), [(-9, None), (0, "<testsuites/>"), (0, SKIPPED)], ids=["killed", "none", "skipped"]
)
def test_a_process_that_ran_no_test_fails(
    monkeypatch: pytest.MonkeyPatch, request: Any, status: int, report: Any
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        if report is not None:
            (file,) = (word.partition("=")[2] for word in command if word.startswith("--junitxml="))
            Path(file).write_text(report)
        return SimpleNamespace(returncode=status, stdout="", stderr="")

    monkeypatch.setattr(_processes.subprocess, "run", run)
    assert _processes.run_on_several_devices(request) == f"exit status {status}\n"


def test_every_kernel_of_a_distribution_has_a_test_class() -> None:
    classes = testing.kernel_proofs("ejkernel-xla", roundings=2.0)
    names = {point.name for point in distribution("ejkernel-xla").entry_points}
    assert {proofs.kernel for proofs in classes.values()} == {name for name in names if "_bwd." not in name}
    attention = classes["TestFlashAttentionXla"]
    assert (attention.kernel, attention.backward) == ("flash_attention.xla", "flash_attention_bwd.xla")
    assert attention.roundings == 2.0


def test_a_kernel_declares_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("ejkernel_xla.flash_attention")
    monkeypatch.setattr(module, "REFUSES", frozenset({"bias"}), raising=False)
    classes = testing.kernel_proofs("ejkernel-xla", refuses=frozenset({"float64"}))
    assert classes["TestFlashAttentionXla"].refuses == {"bias", "float64"}


def test_a_distribution_without_kernels_to_prove_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ejkernel-cache: no entry point of the group .* is a kernel to prove"):
        testing.kernel_proofs("ejkernel-cache")
    with pytest.raises(ValueError, match="no entry point .* is a kernel to prove"):
        testing.kernel_proofs("ejkernel-xla", elsewhere={"xla"})


@pytest.mark.long
def test_examples_that_have_found_a_fault_are_marked(tmp_path: Path) -> None:
    (tmp_path / "test_marks.py").write_text(
        "from ejkernel_testing import KernelProofs\n\n\n"
        "class TestAll(KernelProofs):\n    kernel = 'flash_attention.xla'\n    always = {'no-keys', 'large-logits'}\n\n\n"
        "class TestReference(KernelProofs):\n    kernel = 'flash_attention.reference'\n    grid = False\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def collected(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
        output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        return {line.partition("::")[2] for line in output.splitlines() if "::" in line}

    assert {test for test in collected("-m", "always") if "test_example" in test} == {
        "TestAll::test_example[no-keys]",
        "TestAll::test_example[large-logits]",
    }
    every = collected()
    assert any(test.startswith("TestAll::test_example[grid") for test in every)
    assert not any(test.startswith("TestReference") and "[grid" in test for test in every)


def test_an_example_without_checks_has_no_tests() -> None:
    """The examples of benchmarks have gigabytes, which must not be drawn when tests are collected."""

    def raise_memory_error(draw: int) -> dict[str, Any]:
        raise MemoryError(draw)

    def signature(x: Any) -> None: ...

    def small_arguments(draw: int) -> dict[str, Any]:
        return {"x": np.ones(3)}

    registry = Registry(plugins="")
    examples = [
        Example("large", "double", raise_memory_error, checks=frozenset(), uses=frozenset({"benchmark"})),
        Example("small", "double", small_arguments),
    ]
    registry.register(Operation(name="double", signature=signature, examples=lambda: examples))
    registry.register(SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: inv["x"])), "double.plain")

    class Proofs(testing.KernelProofs):
        kernel = "double.plain"

    Proofs.registry = registry
    assert [example.name for example in Proofs().examples()] == ["small"]


def proofs_of_products(x: float, weight: float, **fields: Any) -> type[testing.KernelProofs]:
    """Of ``products``, x @ weight and the rows' sums, on one example: its weights have 8 bits, and are not rounded."""
    registry = Registry(plugins="")
    seen: list[tuple[str, str]] = []

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        seen.append((str(inv["x"].dtype), str(inv["weight"].dtype)))
        product = inv["x"] @ inv["weight"].astype(inv["x"].dtype)
        return product, product.sum(1)

    def arguments(draw: int) -> dict[str, Any]:
        return {"x": np.full((3, 4), x), "weight": np.full((4, 5), weight, jnp.float8_e4m3fn)}

    example = Example("eighths", "products", arguments, wrt=("x",))
    operation = Operation(
        name="products",
        signature=lambda x, weight: None,
        results=("out", "sums"),
        differentiable=("x",),
        examples=lambda: [example, attrs.evolve(example, name="long", long=True, arguments=lambda draw: 1 / 0)],
    )
    registry.register(operation)
    for backend in ("reference", "plain"):
        registry.register(SimpleNamespace(run_backend=run_backend), f"products.{backend}")
    return type(
        "Proofs",
        (testing.KernelProofs,),
        {"registry": registry, "kernel": "products.plain", "example": example, "seen": seen, **fields},
    )


def test_examples_in_which_all_results_are_zero_are_not_enough() -> None:
    proofs_of_products(0.5, 0.25)().test_zeros()
    with pytest.raises(AssertionError, match="^zeros: products.plain: out, sums is 0 in all quick examples"):
        proofs_of_products(0.5, 0.0)().test_zeros()


def test_the_exact_result_is_of_the_weights_as_they_are() -> None:
    """What has a dtype of its own keeps it in float64: a reference may take weights of 8 bits alone."""
    proofs: Any = proofs_of_products(0.3, 0.3)
    proofs().test_example(proofs.example)
    assert {*proofs.seen} == {("float32", "float8_e4m3fn"), ("float64", "float8_e4m3fn")}


def test_a_few_eight_bit_results_may_be_rounded_to_a_neighbour() -> None:
    rng = np.random.default_rng(2)
    exact = rng.integers(-127, 127, 5000).astype(np.int8)

    def compare(actual: np.ndarray, expected: np.ndarray) -> None:
        example = Example("some", "double", lambda draw: {})
        _checks.compare("values", "double.plain", example, "result", actual, expected, 1e-5)

    rounded = exact.copy()
    rounded[:3] += 1
    compare(rounded, exact)
    for wrong in (
        exact + (np.arange(5000) % 100 == 0).astype(np.int8),
        np.where(np.arange(5000) == 7, exact ^ 3, exact),
    ):
        with pytest.raises(AssertionError, match="result is off by"):
            compare(wrong.astype(np.int8), exact)
    floats = exact.astype(np.float32).astype(jnp.float8_e4m3fn)
    compare((floats.view(np.uint8) ^ (np.arange(5000) == 3)).view(jnp.float8_e4m3fn), floats)
    with pytest.raises(AssertionError, match="NaN"):
        compare(np.where(np.arange(5000) == 3, np.nan, floats.astype(np.float32)).astype(jnp.float8_e4m3fn), floats)


def test_nan_is_expected_where_the_reference_has_it() -> None:
    example = Example("some", "double", lambda draw: {})
    expected = np.array([1.0, np.nan, 3.0])
    compare = partial(_checks.compare, "values", "double.plain", example, "result")
    compare(expected.copy(), expected, 1e-5)
    for wrong in ([1.0, 0.0, 3.0], [np.nan, 2.0, 3.0], [np.nan, np.nan, 3.0]):
        with pytest.raises(AssertionError, match="has . NaN, and the reference 1, or in other places"):
            compare(np.array(wrong), expected, 1e-5)
    with pytest.raises(AssertionError, match="is off by"):
        compare(np.array([1.0, np.nan, 4.0]), expected, 1e-5)


# -- a backward kernel of which there is no forward ------------------------------------------------------------------


def backward_of_rms_norm(factor: float, **fields: Any) -> SimpleNamespace:
    """The gradients of the reference, times a factor."""
    reference = Registry().kernel("rms_norm_bwd", "reference")

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        if factor == 0:
            raise Unsupported("another kernel is for this")
        return reference.heuristic_cfg(inv)

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return tuple(factor * gradient for gradient in reference.run_backend(inv, cfg))

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, **fields)


def proofs_of(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> dict[str, type[testing.KernelProofs]]:
    """The classes of a distribution with these kernels, by their names with "__" for "."."""
    points = [
        SimpleNamespace(group="ejkernel.kernels", name=name.replace("__", "."), load=lambda module=module: module)
        for name, module in modules.items()
    ]
    monkeypatch.setattr(_proofs, "distribution", lambda name: SimpleNamespace(entry_points=points))

    def registry(kernels: Any) -> Registry:
        made = Registry()
        for name, module in kernels.items():
            made.register(module, name)
        return made

    return testing.kernel_proofs("fast-norms", registry=registry)


def test_a_backward_kernel_without_a_forward_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    (proofs,) = proofs_of(monkeypatch, rms_norm_bwd__fast=backward_of_rms_norm(1.0)).values()
    assert proofs.__name__ == "TestRmsNormBwdFast"
    assert (proofs.kernel, proofs.backward) == ("rms_norm.fast", "rms_norm_bwd.fast")
    examples = proofs().examples()
    assert examples
    assert all(example.wrt for example in examples)
    example = min(examples, key=lambda example: example.long)
    proofs().test_example(example)


@pytest.mark.parametrize(
    ("factor", "match"),
    [
        (2.0, "gradient of .* is off by .*; gradients by rms_norm_bwd.fast"),
        (0, r"is refused, but no feature of it \(.*\) is in the kernel's REFUSES: rms_norm_bwd.fast"),
    ],
)
def test_a_wrong_backward_kernel_without_a_forward_is_found(
    monkeypatch: pytest.MonkeyPatch, factor: float, match: str
) -> None:
    (proofs,) = proofs_of(monkeypatch, rms_norm_bwd__fast=backward_of_rms_norm(factor)).values()
    for example in [example for example in proofs().examples() if "jit" in example.checks]:
        with pytest.raises(AssertionError, match=match):
            proofs().test_example(example)


def test_a_backward_kernel_beside_a_forward_of_another_name_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SimpleNamespace(**vars(backward_of_rms_norm(1.0)))
    modules = {"rms_norm__mine": forward, "rms_norm_bwd__mine": backward_of_rms_norm(1.0)}
    classes = proofs_of(monkeypatch, **modules, rms_norm_bwd__fast=backward_of_rms_norm(2.0))
    assert sorted(classes) == ["TestRmsNormBwdFast", "TestRmsNormMine"]
    assert classes["TestRmsNormMine"].backward == "rms_norm_bwd.mine"
    assert "rms_norm.fast" not in {kernel.name for kernel in classes["TestRmsNormMine"].registry.kernels("rms_norm")[0]}


def test_what_a_backward_kernel_refuses_are_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    module = backward_of_rms_norm(1.0, REFUSES=("bias",), REFUSES_GRADIENTS=("residual",), UNPROVED=("vmap",))
    (proofs,) = proofs_of(monkeypatch, rms_norm_bwd__fast=module).values()
    assert (proofs.refuses, proofs.refuses_gradients, proofs.unproved) == (set(), {"bias", "residual"}, {"vmap"})


def test_a_text_is_not_a_tuple_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("REFUSES", "REFUSES_GRADIENTS", "UNPROVED"):
        module = backward_of_rms_norm(1.0, **{field: "bias"}, __name__="fast_norms.rms")
        with pytest.raises(TypeError, match=rf"fast_norms.rms: {field} takes a tuple of words; .* as in \('bias',\)"):
            proofs_of(monkeypatch, rms_norm_bwd__fast=module)
