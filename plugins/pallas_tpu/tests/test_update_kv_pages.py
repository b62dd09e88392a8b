"""The update of pages on TPUs: its copies in the interpreter of a whole TPU, its programs, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Example
from ejkernel_ops.update_kv_pages.examples import drawn
from ejkernel_pallas_tpu import update_kv_pages
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_pallas_tpu.update_kv_pages import Config, _copy
from ejkernel_testing import KernelProofs

KERNELS = {f"{op}.pallas_tpu": update_kv_pages for op in ("update_kv_pages", "update_kv_page_pair")}


# -- with races detected ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_memory():
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


class DetectingRaces(KernelProofs):
    """On a chip with two cores, which have their own parts of the tokens."""

    refuses = frozenset({"float64", "float16"})
    registry = interpreted_registry(KERNELS, device_kind="TPU v5p", races=True)
    #: The ends of the names of examples, one or more for each.
    names: tuple[str, ...] = (
        "in-place",
        "1x1x80x3x1",
        "no-slot-for-some",
        "slots-behind-the-pages",
        "first-page",
        "-with-scales-of-heads",
    )

    def examples(self) -> Sequence[Example]:
        examples = [example for example in super().examples() if example.name.endswith(self.names)]
        assert all(any(example.name.endswith(name) for example in examples) for name in self.names)
        # All other checks are made with the faster interpreter.
        checks = frozenset({"values", "in_place"})
        return [
            attrs.evolve(example, checks=example.checks & checks, variations=(), long=False) for example in examples
        ]


class TestPagesDetectingRaces(DetectingRaces):
    kernel = "update_kv_pages.pallas_tpu"


class TestPairDetectingRaces(DetectingRaces):
    kernel = "update_kv_page_pair.pallas_tpu"
    names = (*DetectingRaces.names, "values-of-40")


def difference(registry: core.Registry, cfg: Config) -> float:
    """How far the pages are off after 75 tokens."""
    arguments = {
        name: jnp.asarray(value, jnp.int32 if name == "slot_mapping" else jnp.float32)
        for name, value in drawn(75, 2, 64, 40, 4, 0).items()
    }
    expected = registry.call("update_kv_pages", **arguments, backend="reference")
    out = registry.call("update_kv_pages", **arguments, backend="pallas_tpu", cfg=cfg)
    return float(jnp.abs(out - expected).max())


def difference_on_two_cores(races: bool = True) -> float:
    """Each has more tokens than it copies at a time."""
    return difference(interpreted_registry(KERNELS, device_kind="TPU v5p", races=races), Config(16))


def test_more_tokens_than_copies_at_a_time():
    assert difference_on_two_cores() == 0


@pytest.mark.parametrize("fault", ["wait", "start"])
def test_copies_that_are_not_made_or_not_waited_for_are_found(monkeypatch, fault):
    """The fast interpreter copies at the start, so it cannot find that nobody waits."""

    def faulty(*refs: Any) -> Any:
        copy = pltpu.make_async_copy(*refs)
        return SimpleNamespace(**{"start": copy.start, "wait": copy.wait, fault: lambda: None})

    monkeypatch.setattr(_copy, "pltpu", SimpleNamespace(make_async_copy=faulty))
    try:
        is_right = difference_on_two_cores(races=fault == "wait") == 0
    except Exception:  # a semaphore that is not 0 at the end
        is_right = False
    assert not is_right


# -- programs --------------------------------------------------------------------------------------------------------

DEVICES = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")
#: The kernel, and operations that compute nothing.
PASSING_ON = ("stablehlo.custom_call", "call", "stablehlo.reshape", "sdy.sharding_constraint")
CALLS = {(example.op, example.name): example for example in update_kv_pages.examples()}
OPERATIONS = list(dict.fromkeys(op for op, _ in CALLS))
NAMES = list(dict.fromkeys(name for _, name in CALLS))


def arrays(op: str, name: str) -> dict[str, Any]:
    """The shapes of a call."""
    return CALLS[op, name].abstract()


def invocation(op: str, name: str, device_kind: str = "TPU v5e", **changes: Any) -> Any:
    inv = core.registry.invocation(op, **{**arrays(op, name), **changes})
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


def lowered(op: str, name: str, device_kind: str, cfg: Config) -> str:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    updated = [array for array in arrays(op, name) if array.endswith("pages")]

    def call(**arrays: Any) -> Any:
        return core.call(op, **arrays, backend="pallas_tpu", cfg=cfg)

    with use_abstract_mesh(mesh):
        traced: Any = jax.jit(call, donate_argnames=updated).trace(**arrays(op, name))
        return str(traced.lower(lowering_platforms=("tpu",)).as_text())


@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_lowers(op, name, device_kind):
    space = list(update_kv_pages.config_space(invocation(op, name, device_kind)))
    assert sorted(cfg.in_flight for cfg in space) == [16, 64, 256]
    for cfg in space:
        assert lowered(op, name, device_kind, cfg).count("@tpu_custom_call") == 1


@pytest.mark.parametrize(("op", "count"), [("update_kv_pages", 1), ("update_kv_page_pair", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_pages_are_given_to_the_kernel_and_returned(op, name, count):
    """The arguments are donated, the kernel's outputs are its operands, and nothing else has all pages."""
    text = lowered(op, name, "TPU v5e", Config())
    assert text.count("tf.aliasing_output") == count
    (call,) = re.findall(r"@tpu_custom_call\((.*?)\) .*output_operand_aliases = \[(.*)\], result_layouts", text)
    operands = call[0].split(", ")
    aliases = re.findall(r"output_tuple_indices = \[(\d?)\],\s*operand_index = (\d+)", call[1])
    # The first operand are the slots, then there is one array of rows for each of pages.
    assert [(int(output or 0), int(operand)) for output, operand in aliases] == [
        (i, 1 + count + i) for i in range(count)
    ]
    assert len(operands) == 1 + 2 * count
    size = min(array.size for key, array in arrays(op, name).items() if key.endswith("pages"))
    for operation, shape in re.findall(r" = ([\w.]+) .*tensor<([\dx]+)x\w+>\)?$", text, re.MULTILINE):
        if np.prod([int(axis) for axis in shape.split("x")]) >= size:
            assert operation in PASSING_ON, text


def test_layers_of_one_array_are_updated_in_place_in_a_scan():
    """Each layer has its own part of the pages, from ``first_page`` on."""
    layers, tokens, heads, dim, pages, page_size = 3, 5, 2, 128, 4, 8
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(layers, tokens, heads, dim)), jnp.float32) for _ in range(2))
    pool = jnp.asarray(rng.normal(size=(layers * pages, page_size, 2 * heads, dim)), jnp.float32)
    slots = jnp.asarray(rng.permutation(pages * page_size)[:tokens], jnp.int32)
    expected = np.array(pool).reshape(layers, pages * page_size, heads, 2, dim)
    expected[:, slots] = np.stack([key, value], axis=3)
    registry = interpreted_registry(KERNELS)

    def call(pool: Any) -> Any:
        def layer(pool: Any, inputs: Any) -> Any:
            number, *tokens = inputs
            arguments = {"kv_pages": pool, "slot_mapping": slots, "first_page": number * pages}
            return registry.call("update_kv_pages", *tokens, **arguments, backend="pallas_tpu"), None

        return jax.lax.scan(layer, pool, (jnp.arange(layers), key, value))[0]

    compiled: Any = jax.jit(call, donate_argnums=0).lower(pool).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
    copies = re.findall(r"= f32\[(?:12,8|96),4,128\]\S* copy\(", compiled.as_text())
    assert copies == []
    assert np.array_equal(compiled(pool), expected.reshape(pool.shape))


# -- configurations and refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "name", "in_flight"),
    [
        ("update_kv_pages", "wide", 64),  # of 16 KiB each
        ("update_kv_page_pair", "wide", 64),
        ("update_kv_pages", "bfloat16", 256),
        ("update_kv_page_pair", "odd", 256),
    ],
)
def test_the_first_configuration_keeps_main_memory_busy(op, name, in_flight):
    space = list(update_kv_pages.config_space(invocation(op, name)))
    assert space[0] == update_kv_pages.heuristic_cfg(invocation(op, name))
    assert space[0].in_flight == in_flight


@pytest.mark.parametrize("cfg", [Config(), Config(interpret=True)])
def test_calls_that_it_does_not_take(cfg):
    changes = {"key": "float16", "value": "float16"}
    given = arrays("update_kv_pages", "bfloat16")
    narrow = {name: jax.ShapeDtypeStruct(given[name].shape, jnp.dtype(dtype)) for name, dtype in changes.items()}
    with pytest.raises(core.Unsupported, match="take bfloat16 and float32; key is float16"):
        update_kv_pages.check_cfg(invocation("update_kv_pages", "bfloat16", **narrow), cfg)
    pages = jax.ShapeDtypeStruct(given["kv_pages"].shape, jnp.dtype("float16"))
    words = "take pages of bfloat16, float32, float8_e4m3fn, int8; these are float16"
    with pytest.raises(core.Unsupported, match=words):
        update_kv_pages.check_cfg(invocation("update_kv_pages", "bfloat16", kv_pages=pages), cfg)
    token = jax.ShapeDtypeStruct((2**17 + 1, 8, 128), jnp.dtype("bfloat16"))
    slots = jax.ShapeDtypeStruct((2**17 + 1,), jnp.dtype("int32"))
    inv = invocation("update_kv_pages", "bfloat16", key=token, value=token, slot_mapping=slots)
    with pytest.raises(
        core.Unsupported, match="the slots of 131073 tokens do not fit into scalar memory: update 13107"
    ):
        update_kv_pages.check_cfg(inv, cfg)


def test_other_devices_are_refused_unless_it_is_interpreted():
    inv = attrs.evolve(invocation("update_kv_pages", "bfloat16"), platform="cpu", device_kind="cpu")
    assert difference(core.registry, Config(interpret=True)) == 0
    with pytest.raises(core.Unsupported, match="the Pallas TPU kernels run on TPUs; this is cpu"):
        update_kv_pages.check_cfg(inv, Config())


def test_a_number_of_copies_is_checked():
    with pytest.raises(ValueError, match="in_flight"):
        Config(in_flight=17)
