"""Compiling for a device that this machine does not have, which an abstract mesh names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from ejkernel_core import Registry, Unsupported, hookimpl
from ejkernel_core.extend import device_name
from ejkernel_tuning import find_labels_in_lowered

X = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)


def mesh(device_kind: str, platform: str = "gpu") -> AbstractMesh:
    return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, None, platform))


@attrs.frozen
class Config:
    card: str
    capability: tuple[int, int] | None


@pytest.fixture
def registry() -> Registry:
    """The reference, which runs everywhere, and a kernel that needs to know the card."""
    registry = Registry()
    reference = registry.kernel("flash_attention", "reference")

    @hookimpl
    def heuristic_cfg(inv: Any) -> Config:
        if inv.device_kind is None:
            raise Unsupported("which card?")
        return Config(inv.device_kind, inv.compute_capability)

    @hookimpl
    def run_backend(inv: Any, cfg: Config) -> Any:
        return reference.run_backend(inv, reference.heuristic_cfg(inv))

    kernel = SimpleNamespace(
        heuristic_cfg=heuristic_cfg, run_backend=run_backend, Config=Config, PLATFORMS={"gpu": 90, "tpu": 90}
    )
    registry.register(kernel, "flash_attention.card")
    return registry


def lowered(registry: Registry, platform: str = "cuda") -> Any:
    # A new function for each call, because JAX caches the trace of a function.
    traced = jax.jit(lambda q: registry.call("flash_attention", q, q, q)).trace(X)
    return traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA A100-SXM4-40GB", "a card to come"])
def test_a_kernel_sees_the_device_that_is_compiled_for(registry: Registry, name: str) -> None:
    with use_abstract_mesh(mesh(name)):
        (label,) = find_labels_in_lowered(lowered(registry))
        plan = registry.plan("flash_attention", X, X, X)
        explanation = registry.explain("flash_attention", X, X, X)
    assert label.backend == "card"
    assert label.config == f"card={quote(name)},capability=None"
    assert plan.invocation.platform == "cpu"  # a call without jit would run here
    for text in (str(plan), str(explanation), str(explanation.backward)):
        assert f" on cpu ({device_name(jax.devices()[0])})\n" in text
        assert name not in text


def test_without_an_abstract_mesh_only_the_platform_is_known(registry: Registry) -> None:
    (label,) = find_labels_in_lowered(lowered(registry))
    assert label.backend != "card"


def test_an_abstract_device_of_another_platform_is_ignored(registry: Registry) -> None:
    with use_abstract_mesh(mesh("TPU v5e", "tpu")):
        (label,) = find_labels_in_lowered(lowered(registry, "cuda"))
        assert label.backend != "card"
        (label,) = find_labels_in_lowered(lowered(registry, "tpu"))
        assert label.config == "card=TPU%20v5e,capability=None"


def test_a_mesh_of_present_devices_changes_nothing(registry: Registry) -> None:
    x = jnp.ones(X.shape)
    with jax.set_mesh(Mesh(jax.devices()[:1], ("x",))):
        plan = registry.plan("flash_attention", X, X, X)
        out = jax.jit(lambda q: registry.call("flash_attention", q, q, q))(x)
    assert plan.invocation.device_kind == device_name(jax.devices()[0])
    assert jnp.allclose(out, x)


def test_a_program_for_an_absent_device_can_be_exported(registry: Registry) -> None:
    export = pytest.importorskip("jax.export")
    with use_abstract_mesh(mesh("NVIDIA H200")):
        exported = export.export(jax.jit(lambda q: registry.call("flash_attention", q, q, q)), platforms=["cuda"])(X)
    assert exported.platforms == ("cuda",)
