"""Broken plugins of every kind: each is reported with its distribution and reason, and breaks no other plugin."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import (
    AutotunePolicy,
    NoKernel,
    Operation,
    PluginError,
    Registry,
    Scope,
    UnknownBackend,
    Unsupported,
    hookimpl,
    policy_override,
)
from tests.distributions import KERNEL, MakeDistribution

X = np.array([1.0, 2.0], np.float32)


@hookimpl
def heuristic_cfg(inv: object) -> None:
    return None


@hookimpl
def run_backend(inv: dict[str, jax.Array], cfg: object) -> jax.Array:
    return inv["x"] * 2


HOOKS = {"heuristic_cfg": heuristic_cfg, "run_backend": run_backend}

BROKEN_KERNELS = {
    "import error": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "syntax error": ("def f(:\n    pass", "SyntaxError"),
    "raises while imported": ("raise RuntimeError('licence expired')", "RuntimeError: licence expired"),
    "misspelt hook": (
        KERNEL + "\n    @hookimpl\n    def config_spaces(inv):\n        return []\n",
        "config_spaces is marked @hookimpl but is not a hook; did you mean config_space?",
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
    "hook that is None": (
        KERNEL + "\n    run_backend = None\n",
        "the hook run_backend is missing",
    ),
    "configurations without heuristic": (
        "import attrs\nfrom ejkernel_core import hookimpl\n\n@attrs.frozen\nclass Config: ...\n\n"
        "@hookimpl\ndef run_backend(inv, cfg):\n    return inv['x']\n",
        "the hook heuristic_cfg is missing",
    ),
    "heuristic that is None": (
        KERNEL + "\n    heuristic_cfg = None\n",
        "the hook heuristic_cfg is missing",
    ),
    "panics while imported": (
        "class PanicException(BaseException): ...\n\nraise PanicException('index out of bounds')",
        "PanicException: index out of bounds",
    ),
    "skips while imported": (
        "import pytest\n\npytest.skip('no device', allow_module_level=True)",
        "Skipped: no device",
    ),
    "fault that cannot be told": (
        "class Fault(Exception):\n    def __str__(self):\n        return self.message\n\nraise Fault",
        "does not load: Fault",
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


@pytest.mark.parametrize("fault", BROKEN_KERNELS)
def test_a_broken_kernel_is_reported_and_breaks_no_call(
    distribution: MakeDistribution, double: None, fault: str
) -> None:
    source, reason = BROKEN_KERNELS[fault]
    module = "broken_" + fault.replace(" ", "_")
    distribution("broken-dist", {module: source}, version="3.1", kernels={"double.broken": module})
    registry = Registry()

    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    verdicts = {verdict.name: verdict for verdict in registry.plan("double", X).verdicts}
    assert verdicts["double.good"].status == "chosen"
    assert verdicts["double.broken"].status == "broken"
    verdict = str(verdicts["double.broken"])
    assert "broken-dist 3.1" in verdict
    assert reason in verdict
    with pytest.raises(PluginError) as error:
        registry.call("double", X, backend="broken")
    assert reason in str(error.value)
    assert "broken-dist 3.1" in str(error.value)


def test_an_optional_hook_may_be_none(double: None) -> None:
    registry = Registry()
    registry.register(SimpleNamespace(**HOOKS, config_space=None), "double.plain")
    np.testing.assert_array_equal(registry.call("double", X, backend="plain"), 2 * X)
    registry.register(SimpleNamespace(select_config=_no_choice, config_selected=None, tuning_progress=None), "quiet")
    statuses = {verdict.name: verdict.status for verdict in registry.plan("double", X).verdicts}
    assert statuses == {"double.good": "chosen", "double.plain": "able"}


def test_a_policy_without_its_hook_is_broken(distribution: MakeDistribution, double: None) -> None:
    distribution("mute-dist", {"mute": "select_config = None"}, policies={"mute": "mute"})
    registry = Registry()
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    assert "mute (mute-dist 1.0): broken, 'mute' of mute-dist 1.0 (mute): the hook select_config is missing" in str(
        registry.plan("double", X)
    )


def test_a_policy_with_two_names_is_called_once(distribution: MakeDistribution, double: None) -> None:
    source = """
        from ejkernel_core import Unsupported, hookimpl

        @hookimpl
        def select_config(inv):
            raise Unsupported("nothing is known")
    """
    distribution("twice-dist", {"twice": source}, policies={"once": "twice", "again": "twice"})
    registry = Registry()
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    reasons = [verdict.reason for verdict in registry.plan("double", X).verdicts]
    assert reasons.count("nothing is known") == 1


def test_a_distribution_without_metadata_has_no_name(distribution: MakeDistribution, double: None) -> None:
    folder = distribution("gone-dist", {"gone": KERNEL, "gone_too": "1/0"}, kernels={"double.gone": "gone_too"})
    (folder / "gone_dist-1.0.dist-info" / "METADATA").unlink()
    for plugins in (None, "-ejkernel-tuning"):
        registry = Registry(plugins=plugins)
        np.testing.assert_array_equal(registry.call("double", X), 2 * X)
        (verdict,) = (v for v in registry.plan("double", X).verdicts if v.name == "double.gone")
        assert (verdict.provider, verdict.status) == ("unknown distribution", "broken")
        with pytest.raises(UnknownBackend, match="did you mean 'gone'"):
            registry.call("double", X, backend="gon")


class PanicException(BaseException):
    """Like the exception that a panic in Rust code raises in Python."""


BASE_EXCEPTIONS = {
    "panic": (PanicException("blocks of 0"), "PanicException: blocks of 0"),
    "exit": (SystemExit("no licence"), "SystemExit: no licence"),
    "skip": (pytest.skip.Exception("no device"), "Skipped: no device"),
}


def test_an_error_of_a_reference_that_determines_the_results_names_it(double: None) -> None:
    registry = Registry()
    registry.register(Operation(name="odd", signature=lambda x: None))
    registry.register(
        SimpleNamespace(**{**HOOKS, "heuristic_cfg": _raising("heuristic_cfg", KeyError("boom"))}), "odd.reference"
    )
    with pytest.raises(KeyError, match="boom") as error:
        registry.call("odd", X)
    assert "in heuristic_cfg of odd.reference (registered at run time)" in error.value.__notes__


@pytest.mark.parametrize("name", BASE_EXCEPTIONS)
def test_a_base_exception_breaks_only_its_plugin(double: None, name: str) -> None:
    fault, message = BASE_EXCEPTIONS[name]
    registry = Registry()
    registry.register(SimpleNamespace(**{**HOOKS, "heuristic_cfg": _raising("heuristic_cfg", fault)}), "double.bad")
    registry.register(SimpleNamespace(select_config=_raising("select_config", fault)), "bad policy")
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    verdicts = {verdict.name: verdict for verdict in registry.plan("double", X).verdicts}
    assert (verdicts["double.bad"].status, verdicts["double.bad"].reason) == (
        "broken",
        f"heuristic_cfg raised {message}",
    )
    assert (verdicts["bad policy"].status, verdicts["bad policy"].reason) == (
        "broken",
        f"select_config raised {message}",
    )
    with pytest.raises(PluginError, match=message):
        registry.call("double", X, backend="bad")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_is_raised_to_the_caller(
    distribution: MakeDistribution, double: None, interrupt: type[BaseException]
) -> None:
    for hooks, name in (
        (SimpleNamespace(**{**HOOKS, "heuristic_cfg": _raising("heuristic_cfg", interrupt())}), "double.slow"),
        (SimpleNamespace(select_config=_raising("select_config", interrupt())), "slow policy"),
    ):
        registry = Registry()
        registry.register(hooks, name)
        with pytest.raises(interrupt):
            registry.plan("double", X)
    module = f"interrupted_by_{interrupt.__name__}"
    distribution("slow-dist", {module: f"raise {interrupt.__name__}"}, kernels={"double.slow": module})
    with pytest.raises(interrupt):
        Registry().plan("double", X)


def test_a_policy_that_cannot_remember_or_report_progress_is_reported(double: None) -> None:
    fault, message = BASE_EXCEPTIONS["panic"]
    hooks = {name: _raising(name, fault) for name in ("config_selected", "tuning_started", "tuning_progress")}
    registry = Registry(plugins="good-dist, ejkernel-tuning")
    registry.register(SimpleNamespace(select_config=_no_choice, **hooks), "a full disk")
    with policy_override(autotune=True, budget_s=60):
        np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    verdicts = [verdict for verdict in registry.plan("double", X).verdicts if verdict.name == "a full disk"]
    assert {verdict.status for verdict in verdicts} == {"broken"}
    assert {verdict.reason for verdict in verdicts} == {f"{hook} raised {message}" for hook in hooks}
    registry.register(SimpleNamespace(select_config=_no_choice), "a full disk")
    assert [verdict.name for verdict in registry.plan("double", X).verdicts] == ["double.good"]


def test_a_store_that_refuses_to_remember_is_reported(double: None) -> None:
    hooks = {"config_selected": _raising("config_selected", Unsupported("it is full"))}
    registry = Registry(plugins="good-dist, ejkernel-tuning")
    registry.register(SimpleNamespace(select_config=_no_choice, **hooks), "a full disk")
    with policy_override(autotune=True, budget_s=60):
        np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    reasons = [v.reason for v in registry.plan("double", X).verdicts if v.name == "a full disk"]
    assert reasons == ["config_selected raised Unsupported: it is full"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, ("broken", "measure raised PluginError: it gives no record; where nothing")),
        (Unsupported("the clock stands"), ("no answer", "the clock stands")),
    ],
)
def test_a_tuner_without_a_result_is_reported_and_the_heuristic_is_used(
    double: None, fault: BaseException | None, expected: tuple[str, str]
) -> None:
    @hookimpl
    def measure(inv: object) -> object:
        if fault is not None:
            raise fault
        return ()

    registry = Registry(plugins="good-dist")
    registry.register(SimpleNamespace(measure=measure), "a clock")
    with policy_override(autotune=True):
        np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    plan = registry.choose(registry.invocation("double", X), None, None, Scope(policy=AutotunePolicy("on_miss")))
    assert plan.origin == "heuristic"
    ((status, reason),) = ((v.status, v.reason) for v in plan.verdicts if v.name == "a clock")
    assert (status, reason[: len(expected[1])]) == expected


def test_a_failure_to_remember_is_reported_until_it_is_fixed(double: None) -> None:
    is_full = [True]

    @hookimpl
    def tuning_started(inv: object) -> object:
        return "there is no room" if is_full else None

    registry = Registry(plugins="good-dist, ejkernel-tuning")
    registry.register(SimpleNamespace(select_config=_no_choice, tuning_started=tuning_started), "a disk")
    for reasons in (["tuning_started returned a str, not an Earlier"], []):
        with policy_override(autotune=True, budget_s=60):
            np.testing.assert_array_equal(registry.call("double", X), 2 * X)
        assert [v.reason for v in registry.plan("double", X).verdicts if v.name == "a disk"] == reasons
        is_full.clear()
        registry.forget()


@hookimpl
def _no_choice(inv: object) -> None:
    return None


def _raising(hook: str, fault: BaseException) -> Callable[..., object]:
    """A hook of this name that raises ``fault``."""

    def raising(inv: object) -> object:
        raise fault

    raising.__name__ = hook
    return hookimpl(raising)


@pytest.mark.parametrize("exception", [ZeroDivisionError, Unsupported, PanicException, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("backend", ["fails", None])
def test_an_error_of_run_backend_reaches_the_caller_with_the_kernels_name(
    double: None, exception: type[BaseException], backend: str | None
) -> None:
    registry = Registry()
    registry.register(
        SimpleNamespace(**{**HOOKS, "run_backend": _raising("run_backend", exception("boom"))}), "double.fails"
    )
    with pytest.raises(exception, match="boom") as error:
        registry.call("double", X, backend=backend)
    assert type(error.value) is exception
    assert "in run_backend of double.fails (registered at run time)" in error.value.__notes__


def test_a_kernel_whose_heuristic_raises_is_skipped(distribution: MakeDistribution, double: None) -> None:
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


def test_the_error_lists_the_reason_of_every_refusing_kernel(distribution: MakeDistribution, double: None) -> None:
    refusing = KERNEL.replace("return None", "raise Unsupported('needs a length below 2')")
    other_platform = KERNEL + "\n    PLATFORMS = {'abacus': 1}\n"
    distribution("b-dist", {"no1": refusing, "no2": other_platform}, kernels={"double.b": "no1", "double.c": "no2"})
    registry = Registry(plugins="b-dist, good-dist")
    registry.register(_RaisingKernel, "double.good")
    with pytest.raises(NoKernel) as error:
        registry.call("double", X)
    message = str(error.value)
    assert "double(x=float32[2]) on cpu" in message
    assert "double.b (b-dist 1.0): refused, needs a length below 2" in message
    assert "double.c (b-dist 1.0): refused, it runs on abacus; this is cpu" in message
    assert "double.good (registered at run time): broken, heuristic_cfg raised ValueError: not today" in message


class _RaisingKernel:
    @staticmethod
    @hookimpl
    def heuristic_cfg(inv: object) -> None:
        raise ValueError("not today")

    @staticmethod
    @hookimpl
    def run_backend(inv: object, cfg: object) -> None: ...


def test_two_distributions_with_the_same_kernel_name(distribution: MakeDistribution, double: None) -> None:
    distribution("first-dist", {"twin1": KERNEL}, kernels={"double.twin": "twin1"})
    distribution("second-dist", {"twin2": KERNEL}, kernels={"double.twin": "twin2"})
    registry = Registry()
    assert registry.plan("double", X).kernel.backend == "good"
    with pytest.raises(PluginError) as error:
        registry.call("double", X, backend="twin")
    for part in ("first-dist 1.0 (twin1)", "second-dist 1.0 (twin2)", "EJKERNEL_PLUGINS=-<distribution>"):
        assert part in str(error.value)
    np.testing.assert_array_equal(Registry(plugins="-first-dist").call("double", X, backend="twin"), 2 * X)


def test_a_distribution_that_is_found_twice_counts_once(distribution: MakeDistribution, double: None) -> None:
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
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "[2.]", process.stderr


def test_an_entry_point_of_an_operation_with_another_value(distribution: MakeDistribution, double: None) -> None:
    distribution("odd-dist", {"odd": "operation = 3"}, operations={"odd": "odd:operation"})
    registry = Registry()
    with pytest.raises(PluginError, match="odd-dist 1.0 .*is of type int, not an Operation"):
        registry.call("odd", X)
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)


def test_a_module_with_the_name_of_its_operation_is_told(distribution: MakeDistribution, double: None) -> None:
    folder = distribution("odd-dist", {"odd": ""}, operations={"twice": "odd:twice"})
    (folder / "odd.py").unlink()
    (folder / "odd").mkdir()
    (folder / "odd" / "__init__.py").write_text("twice = 'an operation'\nfrom .twice import *\n")
    (folder / "odd" / "twice.py").write_text("")
    hint = "is of type module, not an Operation; a module has the name of the operation, and took its place: rename"
    with pytest.raises(PluginError, match=hint):
        Registry().call("twice", X)


def test_a_kernel_that_returns_another_shape_is_reported(double: None) -> None:
    registry = Registry()
    registry.register(_computing_kernel(lambda inv: jnp.concatenate([inv["x"]] * 2)), "double.longer")
    with pytest.raises(PluginError, match=r"double.longer \(registered at run time\) returned \(float32\[4\]\)"):
        registry.call("double", X, backend="longer")


def test_a_kernel_that_returns_none_is_reported(double: None) -> None:
    registry = Registry()
    registry.register(_computing_kernel(lambda inv: None), "double.nothing")
    message = r"returned \(None\); the operation 'double' promises \(float32\[2\]\); of these, out cannot be None in"
    with pytest.raises(PluginError, match=message):
        registry.call("double", X, backend="nothing")


def _computing_kernel(compute: Callable[..., object]) -> type:
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


def test_eight_threads_can_make_the_first_call(distribution: MakeDistribution, double: None) -> None:
    slow_import = (
        "import time, builtins\nbuiltins.slow_imports = getattr(builtins, 'slow_imports', 0) + 1\ntime.sleep(0.2)\n"
    )
    distribution("slow-dist", {"slow_kernel": slow_import + _dedented(KERNEL)}, kernels={"double.slow": "slow_kernel"})
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
