"""``stable_json`` and ``short_hash``: those of the core, and also for objects with ``model_dump``."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_classes import FwdParams, hash_fn, short_hash, stable_json
from ejkernel_core import extend


class Model:
    """Like a pydantic model: fields, and ``model_dump``."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


class Other(Model):
    pass


class Flag(enum.StrEnum):
    ON = "on"


@dataclasses.dataclass(frozen=True)
class Holder:
    inner: Any
    number: int = 3


@attrs.frozen
class Frozen:
    inner: Any


def function(x: Any) -> Any:
    return x


NAME = f"{Model.__module__}.Model"
VALUES_OF_THE_CORE = [
    None, True, 1, 1.5, float("nan"), "text", b"bytes", 1 + 2j, (1, (2, [3])), {"b": 1, "a": {2: "x"}}, {1, 2},
    frozenset({"a"}), jnp.float32, np.float32, np.dtype("float16"), np.int8(3), Flag.ON, ..., Holder((1,)), Frozen({"!a": 1}),
    jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), function, lambda x: x, functools.partial(function, 1, y=(2,)),
    FwdParams(q_blocksize=16), jax.tree.structure({"a": (1, 2)}), jax.sharding.PartitionSpec("x", None), len, Model,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES_OF_THE_CORE, ids=lambda value: type(value).__name__)
def test_without_a_model_the_text_is_the_cores(value: Any) -> None:
    assert stable_json(value) == ejkernel_core.stable_json(value)
    assert short_hash(value) == extend.short_hash(value)
    assert short_hash(value, 8) == short_hash(value)[:8]


def test_the_text_of_a_model_has_class_and_fields() -> None:
    text = stable_json(Model(b=(1, 2), a=jnp.float32))
    fields = '{"a":{"!dtype":"float32"},"b":{"!tuple":[1,2]}}'
    assert text == f'{{"!model":["{NAME}",{fields}]}}'
    assert text == stable_json(Model(a=jnp.float32, b=(1, 2)))
    assert short_hash(Model(a=1)) == short_hash(Model(a=1)) != short_hash(Model(a=2))
    assert len({stable_json(value) for value in (Model(a=1), Other(a=1), Model(a="1"), Model(a=1.0), {"a": 1})}) == 5


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: [model],
        lambda model: {"key": (model,)},
        lambda model: Holder(model),
        lambda model: Frozen([model]),
        lambda model: Model(inner=model),
        lambda model: functools.partial(function, model),
        lambda model: lambda x: (x, model),
    ],
)
def test_a_model_may_be_nested(wrap: Any) -> None:
    text = stable_json(wrap(Model(a=1)))
    assert f'{{"!model":["{NAME}",{{"a":1}}]}}' in text
    assert text == stable_json(wrap(Model(a=1))) != stable_json(wrap(Model(a=2)))
    assert json.loads(text)


def test_hash_fn_includes_models_in_fields() -> None:
    assert hash_fn(Holder(Model(a=1))) == hash_fn(Holder(Model(a=1))) != hash_fn(Holder(Model(a=2)))


def test_a_value_without_content_is_refused() -> None:
    cyclic_list: list[Any] = []
    cyclic_list.append(cyclic_list)
    cyclic_model = Model()
    cyclic_model.fields["again"] = cyclic_model
    for value, message in [
        (object(), "a builtins.object has no content"),
        ([object()], "a builtins.object has no content"),
        (Model(array=jnp.ones(2)), "an array's numbers are not content"),
        (cyclic_list, "a builtins.list contains itself"),
        (cyclic_model, f"a {NAME} contains itself"),
        (Holder, None),
    ]:
        if message is None:
            assert stable_json(value) == ejkernel_core.stable_json(value)
        else:
            with pytest.raises(TypeError, match=message):
                stable_json(value)


def test_a_model_of_a_local_class_is_refused() -> None:
    class Local(Model):
        pass

    with pytest.raises(TypeError, match="cannot be found again by its name"):
        stable_json(Local(a=1))


def test_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")
    model_class = pydantic.create_model("Made", __module__=__name__, block=(int, 128), name=(str, "x"))
    globals()["Made"] = model_class
    try:
        assert stable_json(model_class(block=64)) == f'{{"!model":["{__name__}.Made",{{"block":64,"name":"x"}}]}}'
        assert short_hash(model_class(block=64)) != short_hash(model_class())
    finally:
        del globals()["Made"]
