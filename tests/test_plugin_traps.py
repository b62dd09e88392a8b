"""Every way in which a plugin can be broken: it is named with its distribution and the reason, and breaks nobody else."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import NoKernel, PluginError, Registry, hookimpl
from tests.conftest import KERNEL, MakeDistribution

X = np.array([1.0, 2.0], np.float32)

BROKEN = {
    "import error": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "syntax error": ("def f(:\n    pass", "SyntaxError"),
    "raises while imported": ("raise RuntimeError('licence expired')", "RuntimeError: licence expired"),
    "misspelt hook": (
        KERNEL + "\n    @hookimpl\n    def config_spaces(inv):\n        return []\n",
        "config_spaces is marked @hookimpl but is no hook; did you mean config_space?",
    ),
    "jitted hook": (
        KERNEL + "\n    import jax\n    run_backend = hookimpl(jax.jit(run_backend))\n",
        "a hook is a plain function",
    ),
    "partial hook": (
        KERNEL
        + "\n    import functools\n"
        + "    run_backend = hookimpl(functools.partial(lambda inv, cfg, n: inv['x'], n=2))\n",
        "run_backend is a functools.partial",
    ),
    "missing hook": (
        "from ejkernel_core import hookimpl\n\n@hookimpl\ndef heuristic_cfg(inv):\n    return None\n",
        "the hook run_backend is missing",
    ),
    "hook under another name": (
        KERNEL.replace("    @hookimpl\n    def heuristic_cfg", "    @hookimpl(specname='zzz')\n    def heuristic_cfg"),
        "heuristic_cfg is marked with specname or wrapper",
    ),
    "wrapper": (
        KERNEL.replace("    @hookimpl\n    def run_backend", "    @hookimpl(wrapper=True)\n    def run_backend"),
        "run_backend is marked with specname or wrapper",
    ),
    "exits while imported": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "unmarked hook": (
        KERNEL + "\n    def config_space(inv):\n        return []\n",
        "config_space is not marked @hookimpl",
    ),
    "wrong argument name": (
        KERNEL + "\n    @hookimpl\n    def config_space(invocation):\n        return []\n",
        "config_space takes no argument 'invocation': its arguments are (inv)",
    ),
    "default in a hook": (
        KERNEL + "\n    @hookimpl\n    def config_space(inv=None):\n        return []\n",
        "config_space has a default for 'inv'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_named_and_breaks_nobody(distribution: MakeDistribution, double: None, fault: str) -> None:
    source, reason = BROKEN[fault]
    module = "broken_" + fault.replace(" ", "_")
    distribution("broken-dist", {module: source}, version="3.1", kernels={"double.broken": module})
    registry = Registry()

    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    verdicts = {verdict.name: verdict for verdict in registry.plan("double", X).verdicts}
    assert verdicts["double.good"].status == "chosen"
    assert verdicts["double.broken"].status == "broken"
    told = str(verdicts["double.broken"])
    assert "broken-dist 3.1" in told
    assert reason in told
    with pytest.raises(PluginError) as caught:
        registry.call("double", X, backend="broken")
    assert reason in str(caught.value)
    assert "broken-dist 3.1" in str(caught.value)


def test_a_kernel_that_raises_in_its_heuristic_is_passed_over(distribution: MakeDistribution, double: None) -> None:
    source = KERNEL.replace("return None", "raise ZeroDivisionError('blocks of 0')")
    distribution("broken-dist", {"raises": source}, kernels={"double.raises": "raises"})
    registry = Registry()
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    verdicts = {verdict.name: str(verdict) for verdict in registry.plan("double", X).verdicts}
    assert verdicts["double.raises"] == (
        "double.raises (broken-dist 1.0): broken, heuristic_cfg raised ZeroDivisionError: blocks of 0"
    )
    with pytest.raises(PluginError, match="broken-dist 1.0.*ZeroDivisionError: blocks of 0"):
        registry.call("double", X, backend="raises")


def test_when_all_refuse_each_reason_is_told(distribution: MakeDistribution, double: None) -> None:
    refusing = KERNEL.replace("return None", "raise Unsupported('needs a length below 2')")
    elsewhere = KERNEL + "\n    PLATFORMS = {'abacus': 1}\n"
    distribution("b-dist", {"no1": refusing, "no2": elsewhere}, kernels={"double.b": "no1", "double.c": "no2"})
    registry = Registry(plugins="b-dist, good-dist")
    registry.register(_Refuser, "double.good")
    with pytest.raises(NoKernel) as caught:
        registry.call("double", X)
    message = str(caught.value)
    assert "double(x=float32[2]) on cpu" in message
    assert "double.b (b-dist 1.0): refused, needs a length below 2" in message
    assert "double.c (b-dist 1.0): refused, it runs on abacus; this is cpu" in message
    assert "double.good (registered at run time): broken, heuristic_cfg raised ValueError: not today" in message


class _Refuser:
    @staticmethod
    @hookimpl
    def heuristic_cfg(inv: object) -> None:
        raise ValueError("not today")

    @staticmethod
    @hookimpl
    def run_backend(inv: object, cfg: object) -> None: ...


def test_two_distributions_with_one_kernel_name(distribution: MakeDistribution, double: None) -> None:
    distribution("first-dist", {"twin1": KERNEL}, kernels={"double.twin": "twin1"})
    distribution("second-dist", {"twin2": KERNEL}, kernels={"double.twin": "twin2"})
    registry = Registry()
    assert registry.plan("double", X).kernel.backend == "good"
    with pytest.raises(PluginError) as caught:
        registry.call("double", X, backend="twin")
    for part in ("first-dist 1.0 (twin1)", "second-dist 1.0 (twin2)", "EJKERNEL_PLUGINS=-<distribution>"):
        assert part in str(caught.value)
    np.testing.assert_array_equal(Registry(plugins="-first-dist").call("double", X, backend="twin"), 2 * X)


def test_the_same_distribution_seen_twice_counts_once(distribution: MakeDistribution, double: None) -> None:
    for _ in range(2):
        distribution("again-dist", {"again": KERNEL}, kernels={"double.again": "again"})
    np.testing.assert_array_equal(Registry().call("double", X, backend="again"), 2 * X)


def test_a_plugin_that_calls_the_core_while_it_is_imported(distribution: MakeDistribution, double: None) -> None:
    source = KERNEL + (
        "\n    import ejkernel_core\n"
        "    SEEN = ejkernel_core.Registry().backends('double')\n"
        "    ejkernel_core.Registry().call('double', __import__('numpy').ones(1), backend='good')\n"
    )
    distribution("curious-dist", {"curious": source}, kernels={"double.curious": "curious"})
    np.testing.assert_array_equal(Registry().call("double", X, backend="curious"), 2 * X)


def test_a_plugin_imported_before_the_core(distribution: MakeDistribution, double: None, tmp_path: Path) -> None:
    folder = distribution("early-dist", {"early": KERNEL}, kernels={"double.early": "early"})
    code = (
        f"import sys; sys.path[:0] = {[str(folder), str(tmp_path / 'site1')]!r}\n"
        "import early, ejkernel_core, numpy\n"
        "print(ejkernel_core.call('double', numpy.ones(1), backend='early'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[2.]", done.stderr


def test_an_operation_entry_that_is_no_operation(distribution: MakeDistribution, double: None) -> None:
    distribution("odd-dist", {"odd": "operation = 3"}, operations={"odd": "odd:operation"})
    registry = Registry()
    with pytest.raises(PluginError, match="odd-dist 1.0 .*is a int, no Operation"):
        registry.call("odd", X)
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)


def test_a_kernel_that_returns_another_shape_is_named(double: None) -> None:
    registry = Registry()
    registry.register(_kernel(lambda inv: jnp.concatenate([inv["x"]] * 2)), "double.longer")
    with pytest.raises(PluginError, match=r"double.longer of registered at run time returned \(float32\[4\]\)"):
        registry.call("double", X, backend="longer")


def test_a_kernel_that_returns_nothing_is_named(double: None) -> None:
    registry = Registry()
    registry.register(_kernel(lambda inv: None), "double.nothing")
    with pytest.raises(PluginError, match=r"returned \(NoneType\); the operation 'double' promises \(float32\[2\]\)"):
        registry.call("double", X, backend="nothing")


def _kernel(compute: Callable[..., object]) -> type:
    class Kernel:
        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: object) -> int:
            return 0

        @staticmethod
        @hookimpl
        def run_backend(inv: object, cfg: object) -> object:
            return compute(inv)

    return Kernel


def test_eight_threads_make_the_first_call(distribution: MakeDistribution, double: None) -> None:
    slow = "import time, builtins\nbuiltins.slow_imports = getattr(builtins, 'slow_imports', 0) + 1\ntime.sleep(0.2)\n"
    distribution("slow-dist", {"slow_kernel": slow + _dedented(KERNEL)}, kernels={"double.slow": "slow_kernel"})
    registry = Registry()
    start, results, faults = threading.Barrier(8), [], []

    def first_call() -> None:
        start.wait()
        try:
            results.append(np.asarray(registry.call("double", X, backend="slow")))
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=first_call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(results) == 8
    for result in results:
        np.testing.assert_array_equal(result, 2 * X)
    import builtins

    assert builtins.slow_imports == 1  # type: ignore[attr-defined]


def _dedented(source: str) -> str:
    import textwrap

    return textwrap.dedent(source)
