"""The calls of a program, recorded while it is compiled, or read from the labels in compiled text."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Key, Operation, Record, RecordError, Registry, hookimpl
from ejkernel_core._labels import call_label
from ejkernel_tuning import (
    Label,
    autotune_recorded,
    clear_invocations,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    get_invocations,
    label,
    labels_to_configs,
    record_invocation,
    recording,
)

Q, K, V = (jax.random.normal(key, (2, 48, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))


def attention(q: Any, k: Any, v: Any) -> Any:
    return ejkernel_core.call("flash_attention", q, k, v, causal=True, sliding_window=(20, 0))


def loss(*arrays: Any) -> Any:
    return (attention(*arrays) ** 2).sum()


@pytest.fixture(autouse=True)
def cleared_invocations() -> Iterator[None]:
    clear_invocations()
    yield
    clear_invocations()
    ejkernel_core.registry.forget()


# -- recording -------------------------------------------------------------------------------------------------------


def test_a_run_of_a_compiled_function_is_recorded_with_its_backward() -> None:
    step = jax.jit(jax.grad(loss))
    step(Q, K, V)
    with recording() as invocations:
        step(Q, K, V)
        step(Q, K, V)
        attention(Q, K, V)
    assert [inv.op for inv in invocations] == ["flash_attention", "flash_attention_bwd"]
    assert [inv.op for inv in get_invocations()] == ["flash_attention", "flash_attention_bwd"]
    assert (
        next(iter(invocations)).key
        == ejkernel_core.invocation("flash_attention", Q, K, V, causal=True, sliding_window=(20, 0)).key
    )


def test_lowering_records_the_final_shapes() -> None:
    batch = jax.ShapeDtypeStruct((3, *Q.shape), Q.dtype)
    with recording() as invocations:
        jax.jit(jax.vmap(attention)).lower(batch, batch, batch)
    (inv,) = invocations
    assert inv["query"].shape == (6, 48, 2, 8)


def test_nothing_is_recorded_outside_of_recording() -> None:
    with recording() as invocations:
        pass
    attention(Q, K, V)
    assert list(invocations) == get_invocations() == []


def test_recording_keeps_no_array_alive() -> None:
    array = jax.random.normal(jax.random.key(5), Q.shape)
    reference = weakref.ref(array)
    with recording() as invocations:
        attention(array, array, array)
    del array
    gc.collect()
    assert reference() is None
    for inv in invocations:
        leaves = jax.tree.leaves(dict(inv.arguments))
        assert not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def test_an_invocation_can_be_recorded_by_hand() -> None:
    inv = ejkernel_core.invocation("flash_attention", Q, K, V)
    record_invocation("flash_attention", inv)
    record_invocation("flash_attention", inv)
    assert [invocation.key for invocation in get_invocations()] == [inv.key]
    with pytest.raises(ValueError, match="is of 'flash_attention', not of 'other'"):
        record_invocation("other", inv)


def test_a_recorded_invocation_is_tuned_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as invocations:
        jax.jit(jax.grad(loss)).lower(Q, K, V)
    first, *_ = invocations
    result = autotune_recorded([first])
    assert [t.keys[0] for t in result.tuned] == [first.key]
    # Invocations that have a record are skipped, for example after an interrupt.
    result = autotune_recorded(invocations)
    assert [t.keys[0].op for t in result.tuned] == ["flash_attention_bwd"]
    assert autotune_recorded(get_invocations()).tuned == ()
    explanation = ejkernel_core.explain("flash_attention", Q, K, V, causal=True, sliding_window=(20, 0))
    assert explanation.plan.origin == "memory"
    assert [t.keys[0] for t in autotune_recorded([first], retune=True).tuned] == [first.key]


def test_an_invocation_of_another_registry_is_tuned_for_that_registry() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="thrice", signature=lambda x: None, outputs=lambda a: (a["x"],)))

    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv):
        return inv["x"] * 3

    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "thrice.reference")
    with recording():
        jax.jit(lambda x: registry.call("thrice", x)).lower(Q)
    invocations = get_invocations()
    clear_invocations()
    assert [tuned.best.backend for tuned in autotune_recorded(invocations).tuned] == ["reference"]
    assert registry.plan("thrice", Q).origin == "memory"


# -- labels ----------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "plain": (attention, ["flash_attention"]),
    "grad": (jax.grad(loss), ["flash_attention", "flash_attention_bwd"]),
    "vmap": (jax.vmap(attention), ["flash_attention"]),
    "vmap of grad": (jax.vmap(jax.grad(loss)), ["flash_attention", "flash_attention_bwd"]),
    "in a loop": (
        lambda q, k, v: jax.lax.scan(lambda c, _: (attention(c, k, v), None), q, length=3)[0],
        ["flash_attention"],
    ),
    "checkpointed": (jax.grad(jax.checkpoint(loss)), ["flash_attention", "flash_attention_bwd"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_labels_survive_compilation(name: str) -> None:
    function, ops = PROGRAMS[name]
    arrays = [jnp.stack([a, a]) for a in (Q, K, V)] if "vmap" in name else [Q, K, V]
    lowered = jax.jit(function).lower(*arrays)
    before, after = find_labels_in_lowered(lowered), find_labels_in_lowered(lowered.compile())
    assert sorted(label.name for label in before) == ops
    assert set(after) == set(before)


def test_a_label_has_the_configuration() -> None:
    default_plan = ejkernel_core.plan("flash_attention", Q, K, V, causal=True, sliding_window=(20, 0))
    cfg = attrs.evolve(default_plan.cfg, q_block=16)
    program = jax.jit(
        lambda *a: ejkernel_core.call("flash_attention", *a, causal=True, sliding_window=(20, 0), cfg=cfg)
    )
    (label,) = find_labels_in_lowered(program.lower(Q, K, V).compile())
    assert (label.name, label.backend) == ("flash_attention", "xla")
    assert str(label) == f"flash_attention.xla(q_block=16,kv_block={cfg.kv_block})"
    assert labels_to_configs([label]) == {label: cfg}


@attrs.frozen
class Blocks:
    rows: int = 64
    columns: int = 128


@attrs.frozen
class Nested:
    keys: Blocks = Blocks()
    bias: Blocks | None = None
    name: str = "5"
    scale: float = 0.5
    deep: bool = True


@dataclasses.dataclass(frozen=True)
class Number:
    number: int = -1


@dataclasses.dataclass(frozen=True)
class NumberAndPair:
    number: int = -1
    pair: tuple[int, ...] = ()


@attrs.frozen
class Signed:
    name: str = ""
    zero: float = 0.0
    padding: str = "-" * 20


#: Configurations that can be read back from their labels, by the label's text.
READABLE = {
    "keys=64x128,bias=None,name=%275%27,scale=0.5,deep=True": Nested(),
    "keys=1x2,bias=3x4,name=two%20words,scale=1e-09,deep=False": Nested(
        Blocks(1, 2), Blocks(3, 4), "two words", 1e-9, False
    ),
    "keys=64x128,bias=None,name=%2764x128%27,scale=0.5,deep=True": Nested(name="64x128"),
    "keys=64x128,bias=None,name=%3D%2C%28%2F%40%29,scale=0.5,deep=True": Nested(name="=,(/@)"),
    "keys=64x128,bias=None,name=%27%27,scale=0.5,deep=True": Nested(name=""),
    "keys=64x128,bias=None,name=%7B%7B%7D%7D,scale=0.5,deep=True": Nested(name="{{}}"),
    f"name={'long' * 15},zero=-0.0": Signed("long" * 15, -0.0),
    f"name={'long' * 15}": Signed("long" * 15, 0.0),
    "number=-1": Number(),
    f"name={'long' * 20}": Nested(name="long" * 20),
    "": None,
}
#: Configurations that cannot be read back: their labels have a digest.
UNREADABLE = (
    NumberAndPair(pair=(1, 2)),
    NumberAndPair(),
    Nested(keys=Blocks(-1)),
    Nested(scale=float("inf")),
    Nested(name="long" * 25),
    Nested(name="-" * 20_000),
    {"no": "class"},
    1j,
)


@pytest.mark.parametrize(("text", "cfg"), READABLE.items())
def test_a_readable_label_gives_the_configuration_back(text: str, cfg: Any) -> None:
    label_text = call_label("double.mine", cfg)
    assert label_text == f"double.mine({text})"
    program = jax.jit(jax.named_scope(label_text)(jnp.sin)).lower(Q)
    for stage in (program, program.compile()):
        (label,) = find_labels_in_lowered(stage)
        assert label == Label("double", "mine", text)
        assert labels_to_configs([label], {"double.mine": type(cfg)}) == {label: cfg}


@pytest.mark.parametrize("cfg", UNREADABLE, ids=repr)
def test_the_label_of_an_unreadable_configuration_is_a_digest(cfg: Any) -> None:
    text = call_label("double.mine", cfg)
    assert re.fullmatch(r"double\.mine\([0-9a-f]{12}\)", text)
    (label,) = find_labels_in_lowered(jax.jit(jax.named_scope(text)(jnp.sin)).lower(Q).compile())
    with pytest.raises(RecordError, match="has a digest for its configuration, and none of the records has it"):
        labels_to_configs([label])
    key = Key("double", "cpu", problem="{}")
    records = [(key, (Record(Blocks(), "mine"), Record(cfg, "other"), Record(cfg, "mine")))]
    assert labels_to_configs([label], records=records) == {label: cfg}


@attrs.frozen
class Tiles:
    q: int = 64
    k: int = 128


@attrs.frozen
class Either:
    block: Blocks | Tiles = Blocks()


@attrs.frozen
class Wider(Nested):
    pass


Accented = attrs.make_class("Accented", {"größe": attrs.field(type=int)}, frozen=True)


def read_back(text: str, **keywords: Any) -> Any:
    (label,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{text}/mul"')
    return labels_to_configs([label], **keywords)[label]


def test_the_label_of_an_ambiguous_configuration_is_a_digest() -> None:
    """For example a field that may be of either of two classes, and a subclass of the kernel's Config."""
    key = Key("double", "cpu", problem="{}")
    for cfg, config_type in ((Either(Blocks()), Either), (Either(Tiles()), Either), (Wider(), Nested)):
        text = call_label("double.mine", cfg, config_type)
        assert re.fullmatch(r"double\.mine\([0-9a-f]{12}\)", text)
        assert read_back(text, records=[(key, (Record(cfg, "mine"),))]) == cfg
    labels = {call_label("double.mine", kind(Blocks(-1)), Nested) for kind in (Wider, Nested)}
    assert len(labels) == 2  # both are digests, of classes with equal fields
    assert len({call_label("double.mine", Either(block)) for block in (Blocks(), Tiles())}) == 2


def test_operation_backend_and_field_may_have_any_name() -> None:
    cfg, key = Accented(3), Key("größer" * 9, "cpu", problem="{}")
    assert read_back(call_label("double.mine", cfg), types={"double.mine": Accented}) == cfg
    backend = "größer" * 9
    text = call_label(f"{key.op}.{backend}", cfg)
    assert len(text) <= 100
    assert read_back(text, records=[(key, (Record(cfg, backend),))]) == cfg


class Unwritable:
    pass


def test_a_digest_does_not_depend_on_addresses() -> None:
    first, second = Number(Unwritable()), Number(Unwritable())  # type: ignore[arg-type]
    assert call_label("double.mine", first) == call_label("double.mine", second)


@pytest.mark.parametrize("text", ["number=1,", "number=1,number=2", "number=1,2"])
def test_a_damaged_label_is_refused(text: str) -> None:
    label = Label("double", "mine", text)
    with pytest.raises(RecordError, match="its fields are damaged"):
        labels_to_configs([label], {"double.mine": Number})


def test_the_label_of_a_kernel_that_is_not_installed_is_refused() -> None:
    with pytest.raises(RecordError, match=r"nobodys\.kernel\(number=1\): no kernel .* is installed; give it in types"):
        labels_to_configs([Label("nobodys", "kernel", "number=1")])


def test_different_configurations_have_different_labels() -> None:
    labels = [call_label(f"{op}.mine", cfg) for op in ("a", "b") for cfg in (*READABLE.values(), *UNREADABLE)]
    assert len({*labels}) == len(labels)


def test_a_label_has_at_most_100_characters() -> None:
    text = call_label("operation" * 20 + ".mine", Nested())
    assert len(text) == 100
    (label,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{text}/mul"')
    assert (label.name, label.backend) == (("operation" * 20)[:81], "mine")
    assert call_label("operation" * 20 + "s.mine", Nested()) != text


#: The backends of the kernels of this repository.
KERNELS = ("xla", "triton", "gluon_sm90", "pallas_tpu", "reference")


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_bwd"])
def test_the_labels_of_all_kernels_can_be_read(op: str, backend: str) -> None:
    config_type: Any = ejkernel_core.config_type(f"{op}.{backend}")
    cfg = None if config_type is None else config_type()
    text = call_label(f"{op}.{backend}", cfg)
    (label,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{text}/mul"')
    assert labels_to_configs([label]) == {label: cfg}
    assert ("=" in text) is (cfg is not None)


SCRIPT = """
import jax, ejkernel_core
q = jax.ShapeDtypeStruct((2, 48, 2, 8), "float32")
call = lambda q: ejkernel_core.call("flash_attention", q, q, q, causal=True)
print(jax.jit(call).lower(q).compile().as_text())
"""


def test_labels_are_read_from_the_text_of_another_process() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    text = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=env).stdout
    ((label, cfg),) = labels_to_configs(extract_labels_from_hlo_text(text)).items()
    plan = ejkernel_core.plan("flash_attention", Q, Q, Q, causal=True)
    assert (label.name, label.backend, cfg) == ("flash_attention", "xla", plan.cfg)


def test_labels_of_the_user() -> None:
    @label("my_attention.v2")
    def attention_v2(q: Any, *, scale: float = 1.0) -> Any:
        """Its docstring."""
        return jnp.sin(q) * scale

    assert (attention_v2.__name__, attention_v2.__doc__) == ("attention_v2", "Its docstring.")
    compiled = jax.jit(lambda q: attention_v2(q, scale=2.0)).lower(Q).compile()
    (compiled_label,) = find_labels_in_lowered(compiled)
    assert (compiled_label.name, compiled_label.backend, str(compiled_label)) == (
        "my_attention.v2",
        None,
        "my_attention.v2",
    )
    assert labels_to_configs([compiled_label]) == {}
    with pytest.raises(ValueError, match="letters, digits.*got 'a@b'"):
        label("a@b")


@pytest.mark.parametrize("name", ["my attention", "a/b", "a~b", "a@b", "größer", "a.b", "f(x=1)"])
def test_a_label_may_have_any_operation_name(name: str) -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name=name, signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(simple_kernel(), f"{name}.good")
    lowered = jax.jit(lambda x: registry.call(name, x)).lower(Q)
    for stage in (lowered, lowered.compile()):
        (label,) = find_labels_in_lowered(stage)
        assert (label.name, label.backend) == (name, "good")


def simple_kernel() -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return jnp.sin(inv["x"]) * 2

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def test_a_call_without_content_is_recorded() -> None:
    class Contentless:
        """A class without content that could be written down."""

    registry = Registry(plugins="")
    registry.register(Operation(name="odd", signature=lambda x, *, o=None: None, outputs=lambda a: (a["x"],)))
    registry.register(simple_kernel(), "odd.good")
    with recording() as invocations:
        np.testing.assert_allclose(registry.call("odd", Q, o=Contentless()), jnp.sin(Q) * 2, rtol=1e-6)
    assert [inv.op for inv in invocations] == ["odd"]


def test_an_invocation_that_cannot_be_tuned_does_not_stop_the_others() -> None:
    here = ejkernel_core.invocation("flash_attention", Q, K, V)
    elsewhere = attrs.evolve(here, device_kind=None)
    result = autotune_recorded([elsewhere, here])
    assert ["there is no cpu here to measure on" in str(t.notes) for t in result.tuned] == [True, False]
    assert result.tuned[1].best is not None


def test_other_op_names_are_not_labels() -> None:
    assert extract_labels_from_hlo_text("") == []
    for text in (
        "jit(f)",
        "jit(main)/vmap(jit(np.sin))/mul",
        "transpose(jvp(mod.f))/mul",
        "mod.f(x)/mul",
        "f(x=1)/mul",
    ):
        assert extract_labels_from_hlo_text(f'op_name="{text}"') == []


def test_a_configuration_of_another_version_is_refused() -> None:
    @attrs.frozen
    class Config:
        other: int = 1

    (label,) = find_labels_in_lowered(jax.jit(attention).lower(Q, K, V))
    with pytest.raises(RecordError, match=r"extra fields found \(kv_block, q_block\)"):
        labels_to_configs([label], {"flash_attention.xla": Config})


def test_a_configuration_that_cannot_be_written_has_a_label() -> None:
    @hookimpl
    def heuristic_cfg(inv):
        return 1j  # a number that no record can hold

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "double.odd")
    (label,) = find_labels_in_lowered(jax.jit(lambda x: registry.call("double", x)).lower(Q))
    assert (label.name, label.backend) == ("double", "odd")
