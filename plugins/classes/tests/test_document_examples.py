"""The code examples of ejKernel's document, unchanged but for the name of the package.

Names that an example leaves undefined (``custom_forward``, ``key``, ``...``) are provided, and its effects are checked.
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel_classes
import ejkernel_core
from ejkernel_classes import ConfigCache, ConfigSelectorChain, Executor, Kernel
from ejkernel_classes import Invocation as InvocationClass
from ejkernel_core import Registry, policy_override
from ejkernel_core.extend import device_name
from ejkernel_tuning import clear_invocations, find_labels_in_lowered

#: The examples by their heading.
EXAMPLES = {
    "Basic Kernel Implementation": '''
        from dataclasses import dataclass
        from ejkernel.ops import Kernel
        import jax.numpy as jnp
        # 1. Define your configuration
        @dataclass(frozen=True)
        class MyConfig:
            block_size: int = 128
            num_warps: int = 4
            algorithm: str = "default"
        # 2. Implement the kernel
        class MyKernel(Kernel[MyConfig, jnp.ndarray]):
            def __init__(self):
                super().__init__(name="my_kernel")
            def run(self, a, b, *, cfg: MyConfig, **kwargs) -> jnp.ndarray:
                """Default implementation."""
                # Your operation logic here
                return jnp.dot(a, b)
            def heuristic_cfg(self, inv: "Invocation") -> MyConfig:
                """Generate config based on input shapes."""
                # inv.args contains the input arrays
                a = inv.args[0]
                block = 128 if a.shape[0] >= 128 else 64
                return MyConfig(block_size=block)
    ''',
    "Platform-Specific Implementations": '''
        class AttentionKernel(Kernel[AttentionConfig, jnp.ndarray]):
            def run_triton(self, q, k, v, *, cfg, **kwargs):
                """Triton GPU implementation."""
                return triton_flash_attention(q, k, v, **cfg.triton_params)
            def run_pallas(self, q, k, v, *, cfg, **kwargs):
                """Pallas TPU implementation."""
                return pallas_attention(q, k, v, **cfg.pallas_params)
            def run_xla(self, q, k, v, *, cfg, **kwargs):
                """XLA fallback implementation."""
                return xla_attention(q, k, v)
            def run(self, q, k, v, *, cfg, **kwargs):
                """Default fallback."""
                return self.run_xla(q, k, v, cfg=cfg, **kwargs)
    ''',
    "Custom Gradients (VJP)": '''
        class MyKernel(Kernel[MyConfig, jnp.ndarray]):
            def run(self, a, b, *, cfg, **kwargs):
                return custom_forward(a, b, cfg)
            def custom_vjp(self, primals, cfg, kwargs, cotangents):
                """Custom backward pass."""
                a, b = primals
                ct = cotangents[0]
                grad_a = custom_grad_a(a, b, ct, cfg)
                grad_b = custom_grad_b(a, b, ct, cfg)
                return (grad_a, grad_b)
    ''',
    "Invocation": """
        from ejkernel.ops import Invocation
        # Created automatically by the executor
        inv = Invocation(
            kernel=my_kernel,
            args=(a, b), # Positional arguments
            kwargs={'scale': 1.0}, # Keyword arguments
            metadata={...} # Shapes, dtypes, device info
        )
        # Access abstracted shapes (for config lookup)
        inv.abstract_args # JAX ShapeDtypeStruct versions
        inv.device_fingerprint # Unique device identifier
    """,
    "Executor": """
        from ejkernel.ops import Executor, ConfigSelectorChain, ConfigCache
        # Create the execution stack
        cache = ConfigCache()
        selector = ConfigSelectorChain(cache=cache)
        executor = Executor(selector)
        # Run a kernel
        result = executor(my_kernel, a, b)
        # Run with explicit config
        result = executor(my_kernel, a, b, cfg=my_config)
    """,
    "ConfigCache (In-Memory)": """
        from ejkernel.ops import ConfigCache
        cache = ConfigCache()
        # Store a config
        cache.put(key, config)
        # Retrieve
        config = cache.get(key) # Returns None if not found
        # Check existence
        if key in cache:
            ...
    """,
    "PersistentCache (Disk-Based)": """
        from ejkernel.ops import PersistentCache
        # Stored in ~/.cache/ejkernel/ by default
        persistent = PersistentCache(path="~/.cache/ejkernel/configs")
        # Same interface as ConfigCache
        persistent.put(key, config)
        config = persistent.get(key)
    """,
    "ConfigSelectorChain": """
        from ejkernel.ops import ConfigSelectorChain, ConfigCache, PersistentCache
        selector = ConfigSelectorChain(
            cache=ConfigCache(), # Level 1: In-memory
            persistent=PersistentCache(), # Level 2: Disk
            autotune=True # Level 3: Benchmark if not found
        )
    """,
    "Temporary Overrides": """
        from ejkernel.ops import overlay_cache, policy_override
        # Temporarily use different cache
        with overlay_cache(my_custom_cache):
            result = executor(kernel, args)
        # Temporarily change autotuning policy
        with policy_override(autotune=False):
            result = executor(kernel, args) # No autotuning
    """,
    "Defining Config Space": '''
        class MyKernel(Kernel[MyConfig, jnp.ndarray]):
            def config_space(self, inv: Invocation) -> list[MyConfig]:
                """Return configs to try during autotuning."""
                return [
                    MyConfig(block_size=64, num_warps=2),
                    MyConfig(block_size=128, num_warps=4),
                    MyConfig(block_size=256, num_warps=8),
                ]
    ''',
    "Manual Autotuning": """
        from ejkernel.ops import autotune, benchmark
        # Autotune a specific kernel call
        best_config = autotune(
            kernel, a, b,
            configs=kernel.config_space(inv),
            num_warmup=3,
            num_iters=10
        )
        # Simple function benchmarking
        time_ms = benchmark(lambda: kernel(a, b), num_iters=100)
    """,
    "Batch Autotuning": """
        from ejkernel.ops import autotune_recorded, record_invocation, get_invocations
        # Enable recording
        record_invocation(kernel, inv)
        # ... run your model with various inputs ...
        # Get all recorded invocations
        invocations = get_invocations()
        # Autotune all at once
        results = autotune_recorded(invocations)
    """,
    "vmap_with_config": """
        from ejkernel.ops import vmap_with_config
        # Standard vmap would select config per element
        # vmap_with_config selects once and broadcasts
        batched_result = vmap_with_config(
            kernel,
            in_axes=(0, 0), # Batch over first axis
        )(batched_a, batched_b)
    """,
    "pmap_with_config": """
        from ejkernel.ops import pmap_with_config
        # Run kernel across multiple devices
        parallel_result = pmap_with_config(
            kernel,
            axis_name='devices'
        )(sharded_a, sharded_b)
    """,
    "FwdParams and BwdParams": """
        from ejkernel.ops import FwdParams, BwdParams
        fwd = FwdParams(
            q_blocksize=128, # Query block size
            kv_blocksize=256, # Key-value block size
            num_warps=4, # GPU warps
            num_stages=2, # Pipeline stages
        )
        bwd = BwdParams(
            q_blocksize=64,
            kv_blocksize=128,
        )
    """,
    "Device Detection": """
        from ejkernel.ops import device_kind, get_device_platform, device_fingerprint
        # Get device type
        device_kind() # Returns "gpu", "tpu", or "cpu"
        # Get platform for dispatch
        get_device_platform() # Returns "triton", "pallas", or "xla"
        # Unique device identifier (for caching)
        fingerprint = device_fingerprint()
    """,
    "Sharding Utilities": """
        from ejkernel.ops import sharding_fingerprint, default_key_builder_with_sharding
        # Get fingerprint of array sharding
        fingerprint = sharding_fingerprint(array)
        # Build cache key including sharding info
        key = default_key_builder_with_sharding(kernel, args, kwargs)
    """,
    "Serialization": """
        from ejkernel.ops import to_json, from_json, stable_json
        # Serialize config to JSON
        json_str = to_json(config)
        # Deserialize
        config = from_json(json_str, MyConfig)
        # Stable JSON (deterministic ordering for cache keys)
        stable_str = stable_json(config)
    """,
    "HLO Analysis": """
        from ejkernel.ops import (
            find_labels_in_lowered,
            extract_labels_from_hlo_text,
            labels_to_configs
        )
        # Find labeled operations in lowered JAX code
        lowered = jax.jit(fn).lower(args)
        labels = find_labels_in_lowered(lowered)
        # Extract from HLO text
        labels = extract_labels_from_hlo_text(hlo_text)
        # Convert labels to configs
        configs = labels_to_configs(labels)
    """,
    "Labeling Operations": """
        from ejkernel.ops import label
        # Add label for HLO analysis
        @label("my_attention")
        def my_attention(q, k, v):
            return attention_impl(q, k, v)
    """,
    "Use the Module API for Common Operations": """
        # Recommended for most users
        from ejkernel.modules import flash_attention
        output = flash_attention(q, k, v, causal=True)
    """,
    "Define Good Heuristics": """
        def heuristic_cfg(self, inv):
            # Consider input shapes
            q = inv.args[0]
            batch, seq_len, heads, dim = q.shape
            # Larger sequences benefit from larger blocks
            if seq_len >= 2048:
                block = 256
            elif seq_len >= 512:
                block = 128
            else:
                block = 64
            return MyConfig(block_size=block)
    """,
    "Profile Before Optimizing": """
        with jax.profiler.trace("/tmp/jax-trace"):
            result = executor(kernel, args)
    """,
}


A = jax.random.normal(jax.random.key(0), (5, 7))
B = jax.random.normal(jax.random.key(1), (7, 3))
CT = jnp.arange(15.0).reshape(5, 3)

Run = Callable[..., types.ModuleType]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_registry: Any) -> Path:
    """A new home folder, and a registry of the core without plugins."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    use_registry(Registry(plugins=""))
    return tmp_path / "home"


@pytest.fixture
def run() -> Iterator[Run]:
    """``run(heading, **names)`` runs an example in a new module, in which its classes can be found by name."""
    module_names = []

    def run(heading: str, **names: Any) -> types.ModuleType:
        module = types.ModuleType(f"document_example_{len(module_names)}")
        vars(module).update(names)
        sys.modules[module.__name__] = module
        module_names.append(module.__name__)
        code = textwrap.dedent(EXAMPLES[heading]).replace("from ejkernel.", "from ejkernel_classes.")
        exec(compile(code, heading, "exec", dont_inherit=True), vars(module))
        return module

    yield run
    for name in module_names:
        del sys.modules[name]


@pytest.fixture
def basic(run: Run) -> types.ModuleType:
    """The module of the first example, whose definitions the other examples use."""
    return run("Basic Kernel Implementation")


def cfg_and_origin(executor: Executor, kernel: Kernel[Any, Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """The configuration that an executor would use, and its origin."""
    with executor.selector.entered():
        plan = kernel.plan(*args, **kwargs)
    return plan.cfg, plan.origin


def recorded_cfgs(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations of all further calls of the kernel's ``run``."""
    cfgs: list[Any] = []
    original = type(kernel).run

    def run(self: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        cfgs.append(cfg)
        return original(self, *args, cfg=cfg, **kwargs)

    monkeypatch.setattr(type(kernel), "run", run)
    return cfgs


def test_basic_kernel_implementation(basic: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = basic.MyKernel()
    cfgs = recorded_cfgs(kernel, monkeypatch)
    np.testing.assert_allclose(kernel(A, B), A @ B, rtol=1e-6)
    np.testing.assert_allclose(Executor()(kernel, A, B), A @ B, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(kernel)(A, B), A @ B, rtol=1e-6)
    assert set(cfgs) == {basic.MyConfig(block_size=64, num_warps=4, algorithm="default")}
    cfgs.clear()
    long = jnp.ones((128, 7))
    np.testing.assert_allclose(kernel(long, B), long @ B, rtol=1e-6)
    assert set(cfgs) == {basic.MyConfig(block_size=128)}
    gradients = jax.grad(lambda a, b: (kernel(a, b) * CT).sum(), (0, 1))(A, B)
    np.testing.assert_allclose(gradients[0], CT @ B.T, rtol=1e-5)
    np.testing.assert_allclose(gradients[1], A.T @ CT, rtol=1e-5)
    mapped = jax.vmap(kernel, (0, None))(jnp.stack([A, 2 * A]), B)
    np.testing.assert_allclose(mapped, jnp.stack([A @ B, 2 * A @ B]), rtol=1e-5)


def test_platform_specific_implementations(basic: types.ModuleType, run: Run) -> None:
    attention_calls: list[Any] = []

    @dataclasses.dataclass(frozen=True)
    class AttentionConfig:
        triton_params = {"block": 64}
        pallas_params = {"blocks": 32}

    def attention(name: str) -> Callable[..., Any]:
        def compute(q: Any, k: Any, v: Any, **params: Any) -> Any:
            attention_calls.append((name, params))
            return jax.nn.softmax(q @ k.T) @ v

        return compute

    module = run(
        "Platform-Specific Implementations",
        Kernel=Kernel,
        jnp=jnp,
        AttentionConfig=AttentionConfig,
        triton_flash_attention=attention("triton"),
        pallas_attention=attention("pallas"),
        xla_attention=attention("xla"),
    )
    kernel = module.AttentionKernel()
    q, k, v = jax.random.normal(jax.random.key(2), (3, 6, 4))
    expected = jax.nn.softmax(q @ k.T) @ v
    np.testing.assert_allclose(kernel(q, k, v), expected, rtol=1e-5)
    np.testing.assert_allclose(Executor()(kernel, q, k, v), expected, rtol=1e-5)
    assert {name for name, _ in attention_calls} == {"xla"}
    assert kernel.plan(q, k, v).kernel.backend == "xla"
    for platform, name, params in (("cuda", "triton", {"block": 64}), ("tpu", "pallas", {"blocks": 32})):
        attention_calls.clear()
        jax.jit(kernel).trace(q, k, v).lower(lowering_platforms=(platform,))
        assert (name, params) in attention_calls
    gradients = jax.grad(lambda *a: (kernel(*a) ** 2).sum(), (0, 1, 2))(q, k, v)
    reference_gradients = jax.grad(lambda q, k, v: ((jax.nn.softmax(q @ k.T) @ v) ** 2).sum(), (0, 1, 2))(q, k, v)
    for gradient, expected_gradient in zip(gradients, reference_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_custom_gradients(basic: types.ModuleType, run: Run) -> None:
    cfgs: list[Any] = []

    def record_cfg(compute: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            cfgs.append(args[-1])
            return compute(*args[:-1])

        return function

    module = run(
        "Custom Gradients (VJP)",
        Kernel=Kernel,
        jnp=jnp,
        MyConfig=basic.MyConfig,
        custom_forward=record_cfg(lambda a, b: a @ b),
        # Twice and three times the gradients, so that their use shows.
        custom_grad_a=record_cfg(lambda a, b, ct: 2 * ct @ b.T),
        custom_grad_b=record_cfg(lambda a, b, ct: 3 * a.T @ ct),
    )
    kernel = module.MyKernel()

    def gradients(*arguments: Any, **kwargs: Any) -> Any:
        return jax.grad(lambda a, b: (kernel(a, b, **kwargs) * CT).sum(), (0, 1))(*arguments)

    np.testing.assert_allclose(kernel(A, B), A @ B, rtol=1e-6)
    for results in (gradients(A, B), jax.jit(gradients)(A, B), gradients(A, B, scale=2.0)):
        np.testing.assert_allclose(results[0], 2 * CT @ B.T, rtol=1e-5)
        np.testing.assert_allclose(results[1], 3 * A.T @ CT, rtol=1e-5)
    assert set(cfgs) == {basic.MyConfig()}
    cfgs.clear()
    gradients(A, B, cfg=basic.MyConfig(block_size=32))
    assert basic.MyConfig(block_size=32) in cfgs[1:]
    mapped = jax.vmap(gradients, (0, None))(jnp.stack([A, A + 1]), B)
    np.testing.assert_allclose(mapped[1][1], 3 * (A + 1).T @ CT, rtol=1e-5)


def test_invocation(basic: types.ModuleType, run: Run) -> None:
    kernel = basic.MyKernel()
    module = run("Invocation", my_kernel=kernel, a=A, b=B)
    inv = module.inv
    assert isinstance(inv, InvocationClass)
    assert inv.abstract_args == (jax.ShapeDtypeStruct((5, 7), "float32"), jax.ShapeDtypeStruct((7, 3), "float32"))
    assert inv.device_fingerprint.startswith(device_name(jax.devices()[0]))
    assert (inv.kwargs, inv.metadata) == ({"scale": 1.0}, {...})
    assert inv.args[0] is A
    assert kernel.heuristic_cfg(inv) == basic.MyConfig(block_size=64)
    assert inv.key == kernel.plan(A, B, scale=1.0).invocation.key != kernel.plan(A, B).invocation.key


def test_executor(basic: types.ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, config = basic.MyKernel(), basic.MyConfig(block_size=32, algorithm="other")
    cfgs = recorded_cfgs(kernel, monkeypatch)
    module = run("Executor", my_kernel=kernel, a=A, b=B, my_config=config)
    np.testing.assert_allclose(module.result, A @ B, rtol=1e-6)
    assert cfgs[-1] == config
    assert set(cfgs) == {config, basic.MyConfig(block_size=64)}
    assert len(module.cache) == 0  # heuristic and explicit configurations are not remembered
    assert cfg_and_origin(module.executor, kernel, A, B) == (basic.MyConfig(block_size=64), "heuristic")
    cfgs.clear()
    module.executor(kernel, A, B)
    assert cfgs == []  # nothing is traced again
    cached_cfg = basic.MyConfig(block_size=256)
    module.cache.put(kernel.invocation(A, B).key, cached_cfg)
    np.testing.assert_allclose(module.executor(kernel, A, B), A @ B, rtol=1e-6)
    assert cfgs[-1] == cached_cfg
    assert cfg_and_origin(module.executor, kernel, A, B) == (cached_cfg, "cache")


def test_config_cache(basic: types.ModuleType, run: Run) -> None:
    key = basic.MyKernel().invocation(A, B).key
    config = basic.MyConfig(block_size=16)
    module = run("ConfigCache (In-Memory)", key=key, config=config)
    assert module.config == config
    assert (list(module.cache), len(module.cache)) == ([key], 1)
    assert module.cache.get("another") is None


def test_persistent_cache(basic: types.ModuleType, run: Run, home: Path) -> None:
    kernel = basic.MyKernel()
    key, config = kernel.invocation(A, B).key, basic.MyConfig(block_size=16, algorithm="ä")
    module = run("PersistentCache (Disk-Based)", key=key, config=config)
    assert module.config == config
    assert module.config is not config
    assert key in module.persistent
    assert kernel.invocation(A, 2 * B, scale=1.0).key not in module.persistent
    (file,) = (home / ".cache/ejkernel/configs").rglob("*.json")
    assert '"block_size": 16' in file.read_text()
    reopened_cache = module.PersistentCache(path="~/.cache/ejkernel/configs")
    executor = Executor(ConfigSelectorChain(persistent=reopened_cache))
    assert cfg_and_origin(executor, kernel, A, B) == (config, "persistent")
    np.testing.assert_allclose(executor(kernel, A, B), A @ B, rtol=1e-6)


def test_config_selector_chain(basic: types.ModuleType, run: Run, home: Path) -> None:
    kernel = basic.MyKernel()
    module = run("ConfigSelectorChain")
    assert module.selector.policy.mode == "on_miss"
    executor, key = Executor(module.selector), kernel.invocation(A, B).key
    with policy_override(autotune=False):
        np.testing.assert_allclose(executor(kernel, A, B), A @ B, rtol=1e-6)
    assert (len(module.selector.cache), len(module.selector.persistent)) == (0, 0)
    module.selector.persistent.put(key, basic.MyConfig(block_size=8))
    assert cfg_and_origin(executor, kernel, A, B) == (basic.MyConfig(block_size=8), "persistent")
    module.selector.cache.put(key, basic.MyConfig(block_size=4))
    assert cfg_and_origin(executor, kernel, A, B) == (basic.MyConfig(block_size=4), "cache")
    np.testing.assert_allclose(executor(kernel, A, B), A @ B, rtol=1e-6)
    assert not home.exists()  # the cache is in EJKERNEL_CACHE_DIR, and nothing else is written
    assert [*(home.parent / "cache").rglob("*.json")]


def test_temporary_overrides(basic: types.ModuleType, run: Run) -> None:
    class Times(Kernel[basic.MyConfig, jax.Array]):  # type: ignore[name-defined]
        """Multiplies by its configuration, so that the result shows which one was used."""

        def run(self, args: Any, *, cfg: Any) -> Any:
            results.append(cfg.block_size)
            return args * cfg.block_size

    results: list[int] = []
    kernel, executor, overlay = (
        Times(),
        Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=True)),
        ConfigCache(),
    )
    key = kernel.invocation(A).key
    executor.selector.cache.put(key, basic.MyConfig(block_size=3))
    overlay.put(key, basic.MyConfig(block_size=5))
    module = run("Temporary Overrides", my_custom_cache=overlay, executor=executor, kernel=kernel, args=A)
    # 128 is the heuristic, which is traced for the shapes.
    assert [block for block in results if block != 128] == [5, 3]
    np.testing.assert_allclose(module.result, A * 3)
    with module.overlay_cache(overlay):
        np.testing.assert_allclose(executor(kernel, A), A * 5)
    with module.policy_override(autotune=False):
        np.testing.assert_allclose(executor(kernel, B), B * 128)
    assert kernel.invocation(B).key not in executor.selector.cache


# -- autotuning and later sections -----------------------------------------------------------------------------------


@pytest.fixture
def kernel(basic: types.ModuleType, run: Run) -> Iterator[Any]:
    """The kernel of the first example, with the config_space of another one."""
    names = {name: value for name, value in vars(basic).items() if not name.startswith("__")}
    module_with_space = run("Defining Config Space", **names, Invocation=InvocationClass)

    class Both(basic.MyKernel):  # type: ignore[name-defined,misc]
        config_space = module_with_space.MyKernel.config_space

    clear_invocations()  # those of other packages' tests
    yield Both()
    ejkernel_classes.stop_recording()
    clear_invocations()


def test_defining_config_space(kernel: Any, basic: types.ModuleType) -> None:
    space = kernel.config_space(InvocationClass(kernel=kernel, args=(A, B)))
    assert [(cfg.block_size, cfg.num_warps) for cfg in space] == [(64, 2), (128, 4), (256, 8)]


def test_manual_autotuning(kernel: Any, run: Run) -> None:
    inv = InvocationClass(kernel=kernel, args=(A, B))
    module = run("Manual Autotuning", kernel=kernel, a=A, b=B, inv=inv)
    assert module.best_config.cfg in kernel.config_space(inv)
    (tuned,) = module.best_config.tuned
    assert {entry.cfg for entry in tuned.entries} == set(kernel.config_space(inv))
    assert (kernel.plan(A, B).cfg, kernel.plan(A, B).origin) == (module.best_config.cfg, "memory")
    assert module.time_ms > 0
    assert module.time_ms.spread >= 0


def test_batch_autotuning(kernel: Any, run: Run) -> None:
    inv = InvocationClass(kernel=kernel, args=(A, B))
    module = run("Batch Autotuning", kernel=kernel, inv=inv)
    assert [(invocation.kernel, invocation.key, invocation.args) for invocation in module.invocations] == [
        (kernel, inv.key, inv.abstract_args)
    ]
    (tuned,) = module.results.tuned
    assert tuned.keys[0] == inv.key
    assert kernel.plan(A, B).cfg == module.results.cfg


@pytest.mark.parametrize("heading", ["vmap_with_config", "pmap_with_config"])
def test_vmap_and_pmap_with_config(kernel: Any, run: Run, heading: str) -> None:
    a, b = jnp.stack([A, A + 1, A * 2]), jnp.stack([B, B - 1, B * 3])
    if heading == "vmap_with_config":
        result = run(heading, kernel=kernel, batched_a=a, batched_b=b).batched_result
    else:
        result = run(heading, kernel=kernel, sharded_a=a, sharded_b=b).parallel_result
        assert len(result.sharding.device_set) == 3
    np.testing.assert_allclose(result, np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-5)


def test_fwd_and_bwd_params(run: Run) -> None:
    module = run("FwdParams and BwdParams")
    assert module.fwd.to_dict() == {"q_blocksize": 128, "kv_blocksize": 256, "num_warps": 4, "num_stages": 2}
    assert module.bwd.to_dict() == {"q_blocksize": 64, "kv_blocksize": 128}


def test_device_detection(run: Run) -> None:
    module = run("Device Detection")
    # The document describes the second in two ways. Here it is the platform, and preferred_backend is the backend.
    assert (module.device_kind(), module.get_device_platform()) == ("cpu", "cpu")
    assert ejkernel_classes.preferred_backend() == "xla"
    assert module.fingerprint == ejkernel_classes.device_fingerprint()


def test_sharding_utilities(kernel: Any, run: Run) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    array = jax.device_put(jnp.ones((4, 7)), NamedSharding(mesh, PartitionSpec("x", None)))
    module = run("Sharding Utilities", kernel=kernel, array=array, args=(array, B), kwargs={})
    assert module.fingerprint == "2x1 on 2"
    # The document's key has the sharding. Here a call on a shard is a call like any other.
    assert module.key == kernel.invocation(array, B).key == kernel.invocation(jnp.ones((4, 7)), B).key


def test_serialization(basic: types.ModuleType, run: Run) -> None:
    config = basic.MyConfig(block_size=256)
    module = run("Serialization", config=config, MyConfig=basic.MyConfig)
    assert module.config == config
    assert '"block_size":256' in module.stable_str


def test_hlo_analysis(kernel: Any, basic: types.ModuleType, run: Run) -> None:
    compiled = jax.jit(kernel).lower(A, B).compile()
    module = run(
        "HLO Analysis",
        jax=jax,
        fn=lambda args: kernel(*args),
        args=(A, B),
        hlo_text=compiled.as_text(),
    )
    assert [label.name for label in module.labels] == ["my_kernel"]
    assert list(module.configs.values()) == [kernel.plan(A, B).cfg]


def test_labeling_operations(run: Run) -> None:
    module = run("Labeling Operations", attention_impl=lambda q, k, v: jnp.tanh(q @ k) @ v)
    lowered = jax.jit(module.my_attention).lower(jnp.ones((3, 3)), jnp.ones((3, 3)), jnp.ones((3, 3)))
    assert [label.name for label in find_labels_in_lowered(lowered)] == ["my_attention"]


def test_the_module_api(run: Run, use_registry: Any) -> None:
    use_registry(Registry())
    q, k, v = jax.random.normal(jax.random.key(3), (3, 1, 24, 2, 8))
    module = run("Use the Module API for Common Operations", q=q, k=k, v=v)
    expected = ejkernel_core.call("flash_attention", q, k, v, causal=True, backend="reference")
    np.testing.assert_allclose(module.output, expected, atol=1e-5)


def test_good_heuristics(basic: types.ModuleType, run: Run) -> None:
    module = run("Define Good Heuristics", MyConfig=basic.MyConfig)
    for length, block in ((100, 64), (512, 128), (4096, 256)):
        inv = types.SimpleNamespace(args=(jax.ShapeDtypeStruct((1, length, 2, 8), "float32"),))
        assert module.heuristic_cfg(None, inv).block_size == block


def test_profiling(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_trace = jax.profiler.trace
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: original_trace(str(tmp_path / folder.strip("/"))))

    class Summing(Kernel[Any, jax.Array]):
        def run(self, args: Any, *, cfg: Any) -> Any:
            return args[0] @ args[1]

        def heuristic_cfg(self, inv: Any) -> Any:
            return 1

    module = run("Profile Before Optimizing", jax=jax, executor=Executor(), kernel=Summing(), args=(A, B))
    np.testing.assert_allclose(module.result, A @ B, rtol=1e-5)
    assert list(tmp_path.rglob("*.xplane.pb"))
