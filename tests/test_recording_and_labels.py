"""What a program calls: recorded while it is compiled, and read out of compiled text."""

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
def forgetting() -> Iterator[None]:
    clear_invocations()
    yield
    clear_invocations()
    ejkernel_core.registry.forget()


# -- recording -------------------------------------------------------------------------------------------------------


def test_a_run_is_recorded_with_its_backward_pass_even_if_it_was_compiled_before() -> None:
    step = jax.jit(jax.grad(loss))
    step(Q, K, V)
    with recording() as found:
        step(Q, K, V)
        step(Q, K, V)
        attention(Q, K, V)
    assert [inv.op for inv in found] == ["flash_attention", "flash_attention_bwd"]
    assert [inv.op for inv in get_invocations()] == ["flash_attention", "flash_attention_bwd"]
    assert (
        next(iter(found)).key
        == ejkernel_core.invocation("flash_attention", Q, K, V, causal=True, sliding_window=(20, 0)).key
    )


def test_lowering_is_enough_and_shapes_are_final() -> None:
    rows = jax.ShapeDtypeStruct((3, *Q.shape), Q.dtype)
    with recording() as found:
        jax.jit(jax.vmap(attention)).lower(rows, rows, rows)
    (inv,) = found
    assert inv["query"].shape == (6, 48, 2, 8)


def test_nothing_is_recorded_outside() -> None:
    with recording() as found:
        pass
    attention(Q, K, V)
    assert list(found) == get_invocations() == []


def test_no_array_is_kept() -> None:
    array = jax.random.normal(jax.random.key(5), Q.shape)
    kept = weakref.ref(array)
    with recording() as found:
        attention(array, array, array)
    del array
    gc.collect()
    assert kept() is None
    for inv in found:
        leaves = jax.tree.leaves(dict(inv.arguments))
        assert not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def test_an_invocation_is_recorded_by_hand() -> None:
    inv = ejkernel_core.invocation("flash_attention", Q, K, V)
    record_invocation("flash_attention", inv)
    record_invocation("flash_attention", inv)
    assert [one.key for one in get_invocations()] == [inv.key]
    with pytest.raises(ValueError, match="is of 'flash_attention', not of 'other'"):
        record_invocation("other", inv)


def test_what_was_recorded_is_tuned_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as found:
        jax.jit(jax.grad(loss)).lower(Q, K, V)
    first, *_ = found
    result = autotune_recorded([first])
    assert [t.keys[0] for t in result.tuned] == [first.key]
    # As after an interrupt: what is known is passed over.
    result = autotune_recorded(found)
    assert [t.keys[0].op for t in result.tuned] == ["flash_attention_bwd"]
    assert autotune_recorded(get_invocations()).tuned == ()
    explained = ejkernel_core.explain("flash_attention", Q, K, V, causal=True, sliding_window=(20, 0))
    assert explained.plan.origin == "memory"
    assert [t.keys[0] for t in autotune_recorded([first], retune=True).tuned] == [first.key]


def test_what_another_registry_has_recorded_is_tuned_there_also_when_it_was_forgotten() -> None:
    own = Registry(plugins="")
    own.register(Operation(name="thrice", signature=lambda x: None, outputs=lambda a: (a["x"],)))

    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv):
        return inv["x"] * 3

    own.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "thrice.reference")
    with recording():
        jax.jit(lambda x: own.call("thrice", x)).lower(Q)
    invocations = get_invocations()
    clear_invocations()
    assert [one.best.backend for one in autotune_recorded(invocations).tuned] == ["reference"]
    assert own.plan("thrice", Q).origin == "memory"


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
    assert sorted(found.name for found in before) == ops
    assert set(after) == set(before)


def test_labels_tell_shapes_and_configurations() -> None:
    usual = ejkernel_core.plan("flash_attention", Q, K, V, causal=True, sliding_window=(20, 0))
    cfg = attrs.evolve(usual.cfg, q_block=16)
    program = jax.jit(
        lambda *a: ejkernel_core.call("flash_attention", *a, causal=True, sliding_window=(20, 0), cfg=cfg)
    )
    (found,) = find_labels_in_lowered(program.lower(Q, K, V).compile())
    assert (found.name, found.backend) == ("flash_attention", "xla")
    assert str(found) == f"flash_attention.xla(q_block=16,kv_block={cfg.kv_block})"
    assert labels_to_configs([found]) == {found: cfg}


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
class One:
    number: int = -1


@dataclasses.dataclass(frozen=True)
class Two:
    number: int = -1
    pair: tuple[int, ...] = ()


@attrs.frozen
class Signed:
    name: str = ""
    zero: float = 0.0
    padding: str = "-" * 20


#: Configurations by what stands in their labels: all that can be read back, and a digest of the others.
TEXTS = {
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
    "number=-1": One(),
    f"name={'long' * 20}": Nested(name="long" * 20),
    "": None,
}
DIGESTS = (
    Two(pair=(1, 2)),
    Two(),
    Nested(keys=Blocks(-1)),
    Nested(scale=float("inf")),
    Nested(name="long" * 25),
    Nested(name="-" * 20_000),
    {"no": "class"},
    1j,
)


@pytest.mark.parametrize(("text", "cfg"), TEXTS.items())
def test_a_label_can_be_read_by_a_person_and_back(text: str, cfg: Any) -> None:
    written = call_label("double.mine", cfg)
    assert written == f"double.mine({text})"
    program = jax.jit(jax.named_scope(written)(jnp.sin)).lower(Q)
    for stage in (program, program.compile()):
        (found,) = find_labels_in_lowered(stage)
        assert found == Label("double", "mine", text)
        assert labels_to_configs([found], {"double.mine": type(cfg)}) == {found: cfg}


@pytest.mark.parametrize("cfg", DIGESTS, ids=repr)
def test_what_does_not_fit_is_a_digest_that_records_stand_for(cfg: Any) -> None:
    written = call_label("double.mine", cfg)
    assert re.fullmatch(r"double\.mine\([0-9a-f]{12}\)", written)
    (found,) = find_labels_in_lowered(jax.jit(jax.named_scope(written)(jnp.sin)).lower(Q).compile())
    with pytest.raises(RecordError, match="has a digest for its configuration, and none of the records has it"):
        labels_to_configs([found])
    key = Key("double", "cpu", problem="{}")
    records = [(key, (Record(Blocks(), "mine"), Record(cfg, "other"), Record(cfg, "mine")))]
    assert labels_to_configs([found], records=records) == {found: cfg}


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


def read_back(written: str, **given: Any) -> Any:
    (found,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{written}/mul"')
    return labels_to_configs([found], **given)[found]


def test_what_reads_alike_is_a_digest() -> None:
    """Sizes of one class or of another; fields of the kernel's Config, or of a class that has it for a base."""
    key = Key("double", "cpu", problem="{}")
    for cfg, kind in ((Either(Blocks()), Either), (Either(Tiles()), Either), (Wider(), Nested)):
        written = call_label("double.mine", cfg, kind)
        assert re.fullmatch(r"double\.mine\([0-9a-f]{12}\)", written)
        assert read_back(written, records=[(key, (Record(cfg, "mine"),))]) == cfg
    assert call_label("double.mine", Wider(), Nested) != call_label("double.mine", Nested(Blocks(-1)), Nested)
    assert len({call_label("double.mine", Either(block)) for block in (Blocks(), Tiles())}) == 2


def test_any_text_names_an_operation_a_backend_and_a_field() -> None:
    cfg, key = Accented(3), Key("größer" * 9, "cpu", problem="{}")
    assert read_back(call_label("double.mine", cfg), types={"double.mine": Accented}) == cfg
    backend = "größer" * 9
    written = call_label(f"{key.op}.{backend}", cfg)
    assert len(written) <= 100
    assert read_back(written, records=[(key, (Record(cfg, backend),))]) == cfg


class Unwritable:
    pass


def test_a_digest_has_no_address_in_it() -> None:
    assert call_label("double.mine", One(Unwritable())) == call_label("double.mine", One(Unwritable()))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["number=1,", "number=1,number=2", "number=1,2"])
def test_a_damaged_label_is_told(text: str) -> None:
    found = Label("double", "mine", text)
    with pytest.raises(RecordError, match="its fields are damaged"):
        labels_to_configs([found], {"double.mine": One})


def test_a_kernel_that_is_not_here_cannot_be_read() -> None:
    with pytest.raises(RecordError, match=r"nobodys\.kernel\(number=1\): no kernel .* is installed; give it in types"):
        labels_to_configs([Label("nobodys", "kernel", "number=1")])


def test_two_configurations_have_two_labels() -> None:
    labels = [call_label(f"{op}.mine", cfg) for op in ("a", "b") for cfg in (*TEXTS.values(), *DIGESTS)]
    assert len({*labels}) == len(labels)


def test_no_label_is_longer_than_a_line_of_a_profile() -> None:
    written = call_label("operation" * 20 + ".mine", Nested())
    assert len(written) == 100
    (found,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{written}/mul"')
    assert (found.name, found.backend) == (("operation" * 20)[:81], "mine")


#: All that the kernels here come with.
KERNELS = ("xla", "triton", "gluon_sm90", "pallas_tpu", "reference")


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_bwd"])
def test_the_labels_of_all_installed_kernels_can_be_read(op: str, backend: str) -> None:
    kind: Any = ejkernel_core.config_type(f"{op}.{backend}")
    written = call_label(f"{op}.{backend}", kind())
    (found,) = extract_labels_from_hlo_text(f'op_name="jit(f)/{written}/mul"')
    assert labels_to_configs([found]) == {found: kind()}
    assert "=" in written or not attrs.fields(kind)


SCRIPT = """
import jax, ejkernel_core
q = jax.ShapeDtypeStruct((2, 48, 2, 8), "float32")
call = lambda q: ejkernel_core.call("flash_attention", q, q, q, causal=True)
print(jax.jit(call).lower(q).compile().as_text())
"""


def test_labels_are_read_from_the_text_of_another_process() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    text = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=env).stdout
    ((found, cfg),) = labels_to_configs(extract_labels_from_hlo_text(text)).items()
    plan = ejkernel_core.plan("flash_attention", Q, Q, Q, causal=True)
    assert (found.name, found.backend, cfg) == ("flash_attention", "xla", plan.cfg)


def test_labels_of_ones_own() -> None:
    @label("my_attention.v2")
    def mine(q: Any, *, scale: float = 1.0) -> Any:
        """Its docstring."""
        return jnp.sin(q) * scale

    assert (mine.__name__, mine.__doc__) == ("mine", "Its docstring.")
    compiled = jax.jit(lambda q: mine(q, scale=2.0)).lower(Q).compile()
    (found,) = find_labels_in_lowered(compiled)
    assert (found.name, found.backend, str(found)) == ("my_attention.v2", None, "my_attention.v2")
    assert labels_to_configs([found]) == {}
    with pytest.raises(ValueError, match="letters, digits.*got 'a@b'"):
        label("a@b")


@pytest.mark.parametrize("name", ["my attention", "a/b", "a~b", "a@b", "größer", "a.b", "f(x=1)"])
def test_a_label_tells_any_name(name: str) -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name=name, signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(doubling(), f"{name}.good")
    lowered = jax.jit(lambda x: registry.call(name, x)).lower(Q)
    for stage in (lowered, lowered.compile()):
        (found,) = find_labels_in_lowered(stage)
        assert (found.name, found.backend) == (name, "good")


def doubling() -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return jnp.sin(inv["x"]) * 2

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def test_a_call_without_content_is_recorded_too() -> None:
    class Odd:
        """Nothing that could be written down."""

    registry = Registry(plugins="")
    registry.register(Operation(name="odd", signature=lambda x, *, o=None: None, outputs=lambda a: (a["x"],)))
    registry.register(doubling(), "odd.good")
    with recording() as found:
        np.testing.assert_allclose(registry.call("odd", Q, o=Odd()), jnp.sin(Q) * 2, rtol=1e-6)
    assert [inv.op for inv in found] == ["odd"]


def test_what_cannot_be_tuned_does_not_stop_the_others() -> None:
    good = ejkernel_core.invocation("flash_attention", Q, K, V)
    cut = attrs.evolve(good, sharding=(("query", "2x1x1x1 on 2"),))
    result = autotune_recorded([cut, good])
    assert ["sharded over several devices" in str(t.notes) for t in result.tuned] == [True, False]
    assert result.tuned[1].best is not None


def test_what_is_no_label_is_no_label() -> None:
    assert extract_labels_from_hlo_text("") == []
    for text in (
        "jit(f)",
        "jit(main)/vmap(jit(np.sin))/mul",
        "transpose(jvp(mod.f))/mul",
        "mod.f(x)/mul",
        "f(x=1)/mul",
    ):
        assert extract_labels_from_hlo_text(f'op_name="{text}"') == []


def test_a_configuration_of_another_version_is_told() -> None:
    @attrs.frozen
    class Config:
        other: int = 1

    (found,) = find_labels_in_lowered(jax.jit(attention).lower(Q, K, V))
    with pytest.raises(RecordError, match=r"extra fields found \(kv_block, q_block\)"):
        labels_to_configs([found], {"flash_attention.xla": Config})


def test_a_configuration_that_cannot_be_written_leaves_a_label_all_the_same() -> None:
    @hookimpl
    def heuristic_cfg(inv):
        return 1j  # a number that no record can hold

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "double.odd")
    (found,) = find_labels_in_lowered(jax.jit(lambda x: registry.call("double", x)).lower(Q))
    assert (found.name, found.backend) == ("double", "odd")
