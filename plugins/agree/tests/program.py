"""One process of a program of several: ``python program.py SCENARIO RANK COUNT PORT``. It prints its results as JSON.

The operation ``scale`` multiplies by the factor of its configuration, so that the results show which one was chosen.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_agree
from ejkernel_agree import _agreement
from ejkernel_core import Axes, Choice, Operation, Provenance, Record, Registry, Unsupported, hookimpl, policy_override

SCENARIOS: dict[str, Callable[[int], Any]] = {}
#: The seconds of each agreement in this process.
SECONDS: list[float] = []


def scenario(function: Callable[[int], Any]) -> Callable[[int], Any]:
    SCENARIOS[function.__name__] = function
    return function


@attrs.frozen
class Config:
    factor: int = 100
    #: Whether the kernel has a collective more.
    sums: bool = False


def scale(x): ...


def kernel(heuristic: Config = Config(), refusal: str | None = None, version: int = 1, rank: int = 50) -> Any:
    @hookimpl
    def heuristic_cfg(inv):
        if refusal:
            raise Unsupported(refusal)
        return heuristic

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor + (0 * inv["x"].sum() if cfg.sums else 0)

    return SimpleNamespace(
        PLATFORMS={"cpu": rank}, VERSION=version, Config=Config, heuristic_cfg=heuristic_cfg, run_backend=run_backend
    )


def policy(factor: int) -> Any:
    @hookimpl
    def select_config(inv, candidates):
        return Choice(candidates[0].backend, Config(factor), f"policy of factor {factor}")

    return SimpleNamespace(select_config=select_config)


def tuner(factor: int, seconds: float) -> Any:
    """A tuner that takes so long, and finds this factor; ``count`` is the number of measurements."""

    @hookimpl
    def measure(inv, candidates):
        time.sleep(seconds)
        tuning.count += 1
        provenance = Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=1.0, backends=("one",))
        return (Record(Config(factor), candidates[0].backend, provenance),)

    tuning = SimpleNamespace(measure=measure, count=0)
    return tuning


def make_registry(**plugins: Any) -> Registry:
    """A registry with the operation, these plugins (``one`` and ``two`` are kernels), and the plugin of this project."""
    registry = Registry(plugins=PLUGINS)
    axes = Axes({"x": "..."}, {"out": "..."}, independent="...", vmap="...", counts="...")
    registry.register(Operation(name="scale", signature=scale, axes=axes))
    for name, plugin in {"one": kernel(), **plugins}.items():
        registry.register(plugin, f"scale.{name}" if name in ("one", "two") else name)
    return registry


PLUGINS = "ejkernel-agree"


def array(length: int = 24, processes: Any = None) -> jax.Array:
    """A vector of ones, which is sharded over all devices of these processes."""
    devices = [d for d in jax.devices() if processes is None or d.process_index in processes]
    sharding = NamedSharding(Mesh(np.array(devices), ("i",)), P("i"))
    return jax.make_array_from_callback((length,), sharding, lambda index: np.ones(length, np.float32)[index])


def value(x: jax.Array) -> float:
    """The one value of an array's shards in this process."""
    (number,) = {float(v) for shard in x.addressable_shards for v in np.asarray(shard.data).ravel()}
    return number


def call(registry: Registry, x: jax.Array) -> float:
    """The factor that all processes run with: the sum would differ, if one had another one."""
    out, total = jax.jit(lambda x: (y := registry.call("scale", x), y.sum()))(x)
    assert value(total) == x.size * value(out), (value(total), value(out))
    return value(out)


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns, or its error, and when."""
    begin = time.monotonic()
    try:
        result = {"value": function()}
    except Exception as fault:
        result = {"error": type(fault).__name__, "text": str(fault)}
    return {**result, "seconds": time.monotonic() - begin, "at": time.time()}


def chosen(registry: Registry, x: jax.Array) -> Any:
    """Choose without running: the others may not come."""

    def lower() -> Any:
        jax.jit(lambda x: registry.call("scale", x)).lower(x)
        return registry.plan("scale", x).cfg.factor

    return outcome(lower)


# -- the scenarios ----------------------------------------------------------------------------------------------------


@scenario
def differ(rank: int) -> Any:
    """Each process would choose another factor."""
    registry = make_registry(store=policy(rank + 1))
    results = [outcome(lambda length=length: call(registry, array(length))) for length in (24, 48, 96)]
    plan = registry.plan("scale", array())
    return {"results": results, "origin": plan.origin, "note": plan.choice.note}


@scenario
def subset(rank: int) -> Any:
    """Processes 1 and 2 have a program of their own, and each process one for itself alone."""
    registry = make_registry(store=policy(rank + 1))
    alone = outcome(lambda: value(registry.call("scale", jnp.ones(6))))
    pair = outcome(lambda: call(registry, array(processes=(1, 2)))) if rank else None
    return {"alone": alone, "pair": pair, "all": outcome(lambda: call(registry, array(48)))}


@scenario
def first_never_comes(rank: int) -> Any:
    registry = make_registry(store=policy(rank + 1))
    return [chosen(registry, array(length)) for length in (24, 48)] if rank != 0 else None


@scenario
def last_never_comes(rank: int) -> Any:
    registry = make_registry(store=policy(rank + 1))
    return [chosen(registry, array(length)) for length in (24, 48)] if rank != 2 else None


@scenario
def first_raises(rank: int) -> Any:
    """Process 0 has no configuration, and is forbidden to take the heuristic."""
    registry = make_registry(**({"store": policy(rank + 1)} if rank else {}))
    with policy_override(mode="error_on_miss"):
        return [outcome(lambda: call(registry, array())) for _ in range(2)]


@scenario
def last_has_no_kernel(rank: int) -> Any:
    registry = make_registry(one=kernel(refusal="its driver is too old" if rank == 2 else None))
    return outcome(lambda: call(registry, array()))


@scenario
def one_refuses(rank: int) -> Any:
    """Of two kernels, process 1 cannot run the one that the others prefer."""
    registry = make_registry(one=kernel(rank=10), two=kernel(refusal="no driver" if rank == 1 else None, rank=90))
    return outcome(lambda: call(registry, array()))


@scenario
def first_is_late(rank: int) -> Any:
    time.sleep(3 * (rank == 0))
    return outcome(lambda: call(make_registry(store=policy(rank + 1)), array()))


@scenario
def last_is_late(rank: int) -> Any:
    time.sleep(3 * (rank == 2))
    return outcome(lambda: call(make_registry(store=policy(rank + 1)), array()))


@scenario
def later_than_the_wait(rank: int) -> Any:
    """Process 0 comes when the others have chosen without it."""
    time.sleep(4 * (rank == 0))
    return outcome(lambda: call(make_registry(store=policy(rank + 1)), array()))


@scenario
def versions(rank: int) -> Any:
    registry = make_registry(one=kernel(version=4 if rank == 2 else 3))
    return outcome(lambda: call(registry, array()))


@scenario
def collective(rank: int) -> Any:
    """By itself, process 0 would run a collective more than the others."""
    registry = make_registry(one=kernel(Config(5, sums=rank == 0)))
    return outcome(lambda: call(registry, array()))


@scenario
def collective_without_the_plugin(rank: int) -> Any:
    global PLUGINS
    PLUGINS = ""
    return collective(rank)


@scenario
def scopes(rank: int) -> Any:
    """Process 1 makes the call in another scope."""
    registry = make_registry(store=policy(rank + 1))
    with policy_override(budget_s=7 if rank == 1 else 8):
        return outcome(lambda: call(registry, array()))


@scenario
def renewed(rank: int) -> Any:
    registry = make_registry(store=policy(rank + 1))
    factors = [call(registry, array())]
    registry.register(policy(10 * (rank + 1)), "store")
    factors.append(call(registry, array()))
    ejkernel_agree.renew()
    registry.register(policy(10 * (rank + 1)), "store")
    return [*factors, call(registry, array())]


@scenario
def renewed_by_some(rank: int) -> Any:
    if rank:
        ejkernel_agree.renew()
    return outcome(lambda: call(make_registry(store=policy(rank + 1)), array()))


@scenario
def threads(rank: int) -> Any:
    """Several threads of each process ask the same at once."""
    registry, choices = make_registry(store=policy(rank + 1)), []
    workers = [threading.Thread(target=lambda: choices.append(chosen(registry, array()))) for _ in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"choices": choices, "value": call(registry, array())}


@scenario
def tuned(rank: int) -> Any:
    """Process 0 measures for 2 s, the others wait; then more calls, jitted and not, of two shapes."""
    measuring = tuner(rank + 1, 2.0)
    registry = make_registry(tuner=measuring)
    with policy_override(autotune=True, budget_s=20):
        first = outcome(lambda: call(registry, array()))
        eager = outcome(lambda: value(registry.call("scale", array())))
        other = outcome(lambda: call(registry, array(4800)))
    count = measuring.count
    # What another process has measured is not stored here.
    local = registry.plan("scale", jnp.ones(24)).origin
    return {
        "first": first,
        "eager": eager,
        "other": other,
        "measured": count,
        "stored": len(registry.memory),
        "local": local,
    }


@scenario
def without_the_plugin(rank: int) -> Any:
    """Each process would measure, and has a store of its own; one policy is the same everywhere."""
    global PLUGINS
    PLUGINS = ""
    measuring = tuner(rank + 1, 0.0)
    registry = make_registry(tuner=measuring)
    with warnings.catch_warnings(record=True) as caught, policy_override(autotune=True):
        warnings.simplefilter("always")
        factors = [call(registry, array(length)) for length in (24, 48)]
        registry.register(policy(rank + 1), "store")
        factors.append(call(registry, array(96)))
        registry.register(SimpleNamespace(**vars(policy(7)), IS_SAME_EVERYWHERE=True), "same")
        factors.append(call(registry, array(120)))
        alone = value(registry.call("scale", jnp.ones(6)))
    texts = [str(warning.message) for warning in caught if "choose alike" in str(warning.message)]
    return {"factors": factors, "alone": alone, "measured": measuring.count, "warnings": texts}


@scenario
def meshes(rank: int) -> Any:
    """The processes are known with automatic, explicit and manual axes, however the mesh is given."""
    registry = make_registry(store=policy(rank + 1))
    explicit = jax.make_mesh((6,), ("i",))
    factors = {}

    def double(x: Any) -> Any:
        return registry.call("scale", x)

    def run(name: str, function: Any, mesh: Any, length: int) -> None:
        ones = np.ones(length, np.float32)
        x = jax.make_array_from_callback(ones.shape, NamedSharding(mesh, P("i")), lambda index: ones[index])
        factors[name] = value(jax.jit(function)(x))

    automatic = jax.make_mesh((6,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    run("automatic", double, automatic, 6)
    run("explicit", double, explicit, 12)
    run("shard_map", jax.shard_map(double, mesh=automatic, in_specs=P("i"), out_specs=P("i")), automatic, 18)
    run("shard_map, explicit", jax.shard_map(double, mesh=explicit, in_specs=P("i"), out_specs=P("i")), explicit, 24)
    abstract = explicit.abstract_mesh
    run("abstract", jax.shard_map(double, mesh=abstract, in_specs=P("i"), out_specs=P("i")), explicit, 30)
    with jax.set_mesh(explicit):
        run("set_mesh", jax.shard_map(double, in_specs=P("i"), out_specs=P("i")), explicit, 36)
    return factors


@scenario
def attention(rank: int) -> Any:
    """Two operations with their gradients; each process would choose other blocks."""
    from ejkernel_core import registry

    class Blocks:
        @hookimpl
        def select_config(self, inv, candidates):
            cfg = candidates[0].cfg
            fields = {f.name: 16 * (rank + 1) for f in attrs.fields(type(cfg)) if f.name.endswith("block")}
            return Choice(candidates[0].backend, attrs.evolve(cfg, **fields), "blocks")

    registry.register(Blocks(), "blocks")
    mesh = Mesh(np.array(jax.devices()), ("i",))
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(6, 40, 4, 16), (6, 40, 2, 16), (6, 40, 2, 16), (6, 40, 4, 16)]
    q, k, v, weights = (np.asarray(jax.random.normal(key, shape)) for key, shape in zip(keys, shapes, strict=False))
    gamma = np.asarray(jax.random.normal(keys[4], (16,)))

    def loss(q: Any, k: Any, v: Any, gamma: Any, weights: Any, backend: Any = None) -> Any:
        out = registry.call("flash_attention", q, k, v, causal=True, backend=backend)
        return (registry.call("rms_norm", out, gamma, backend=backend) * weights).sum()

    grad = jax.value_and_grad(loss, (0, 1, 2, 3))

    def place(x: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P("i") if x.ndim > 1 else P())
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    arrays = [place(x) for x in (q, k, v, gamma, weights)]
    total, gradients = jax.jit(grad)(*arrays)
    expected_total, expected = jax.jit(lambda *a: grad(*a, "reference"))(q, k, v, gamma, weights)
    errors = [abs(value(total) - float(expected_total)) / abs(float(expected_total))]
    for got, want in zip(gradients, expected, strict=True):
        for shard in got.addressable_shards:
            errors.append(float(np.abs(np.asarray(shard.data) - np.asarray(want)[shard.index]).max()))
    plan = registry.plan("flash_attention", *arrays[:3], causal=True)
    return {"error": max(errors), "plan": f"{plan.kernel.name} {plan.cfg}", "note": plan.choice.note}


# -- running ----------------------------------------------------------------------------------------------------------


def main(name: str, rank: int, count: int, port: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, heartbeat_timeout_seconds=10)
    settle = _agreement.Agreement.settle

    def timed(self: Any, *arguments: Any) -> Any:
        begin = time.monotonic()
        try:
            return settle(self, *arguments)
        finally:
            SECONDS.append(time.monotonic() - begin)

    _agreement.Agreement.settle = timed  # type: ignore[method-assign]
    jax.devices()  # all processes meet here, so that they begin together
    result = SCENARIOS[name](rank)
    print(json.dumps({"rank": rank, "result": result, "agreements": SECONDS}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
