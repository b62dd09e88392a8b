"""``stable_json`` and ``short_hash``: the core's, and what has ``model_dump`` is content."""

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
from ejkernel_core import _keys


class Model:
    """As a model of pydantic is: fields, and ``model_dump``."""

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
LIKE_THE_CORES = [
    None, True, 1, 1.5, float("nan"), "text", b"bytes", 1 + 2j, (1, (2, [3])), {"b": 1, "a": {2: "x"}}, {1, 2},
    frozenset({"a"}), jnp.float32, np.float32, np.dtype("float16"), np.int8(3), Flag.ON, ..., Holder((1,)), Frozen({"!a": 1}),
    jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), function, lambda x: x, functools.partial(function, 1, y=(2,)),
    FwdParams(q_blocksize=16), jax.tree.structure({"a": (1, 2)}), jax.sharding.PartitionSpec("x", None), len, Model,
]  # fmt: skip


@pytest.mark.parametrize("value", LIKE_THE_CORES, ids=lambda value: type(value).__name__)
def test_without_a_model_it_is_the_cores_text(value: Any) -> None:
    assert stable_json(value) == ejkernel_core.stable_json(value)
    assert short_hash(value) == _keys.short_hash(value)
    assert short_hash(value, 8) == short_hash(value)[:8]


def test_a_model_is_its_class_and_its_fields() -> None:
    text = stable_json(Model(b=(1, 2), a=jnp.float32))
    fields = '{"a":{"!dtype":"float32"},"b":{"!tuple":[1,2]}}'
    assert text == f'{{"!model":["{NAME}",{fields}]}}'
    assert text == stable_json(Model(a=jnp.float32, b=(1, 2)))
    assert short_hash(Model(a=1)) == short_hash(Model(a=1)) != short_hash(Model(a=2))
    assert len({stable_json(one) for one in (Model(a=1), Other(a=1), Model(a="1"), Model(a=1.0), {"a": 1})}) == 5


@pytest.mark.parametrize(
    "inside",
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
def test_a_model_may_be_anywhere(inside: Any) -> None:
    text = stable_json(inside(Model(a=1)))
    assert f'{{"!model":["{NAME}",{{"a":1}}]}}' in text
    assert text == stable_json(inside(Model(a=1))) != stable_json(inside(Model(a=2)))
    assert json.loads(text)


def test_a_model_in_fields_is_hashed() -> None:
    assert hash_fn(Holder(Model(a=1))) == hash_fn(Holder(Model(a=1))) != hash_fn(Holder(Model(a=2)))


def test_what_has_no_content_is_told() -> None:
    circle: list[Any] = []
    circle.append(circle)
    again = Model()
    again.fields["again"] = again
    for value, told in [
        (object(), "a builtins.object has no content"),
        ([object()], "a builtins.object has no content"),
        (Model(array=jnp.ones(2)), "an array's numbers are no content"),
        (circle, "a list contains itself"),
        (again, "a Model contains itself"),
        (Holder, None),
    ]:
        if told is None:
            assert stable_json(value) == ejkernel_core.stable_json(value)
        else:
            with pytest.raises(TypeError, match=told):
                stable_json(value)


def test_a_class_that_cannot_be_found_again_is_no_content() -> None:
    class Local(Model):
        pass

    with pytest.raises(TypeError, match="cannot be found again by its name"):
        stable_json(Local(a=1))


def test_models_of_pydantic() -> None:
    pydantic = pytest.importorskip("pydantic")
    made = pydantic.create_model("Made", __module__=__name__, block=(int, 128), name=(str, "x"))
    globals()["Made"] = made
    try:
        assert stable_json(made(block=64)) == f'{{"!model":["{__name__}.Made",{{"block":64,"name":"x"}}]}}'
        assert short_hash(made(block=64)) != short_hash(made())
    finally:
        del globals()["Made"]
