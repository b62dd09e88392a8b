"""Configurations and records as JSON: read back exactly, or refused with the path of the fault."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel_core import (
    Key,
    Provenance,
    Record,
    RecordError,
    from_json,
    record_from_json,
    record_to_json,
    stable_json,
    to_json,
)
from ejkernel_core.extend import Shortfall


class Order(enum.Enum):
    ROWS = "rows"
    COLUMNS = 2


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 16
    columns: int = 8


@attrs.frozen
class Config:
    block: int = 64
    scale: float = 1.0
    name: str = "default"
    eager: bool = False
    order: Order = Order.ROWS
    mode: Literal["fast", "exact"] = "fast"
    tile: Tile = Tile()
    tiles: tuple[Tile, ...] = ()
    limit: int | None = None
    either: int | str = 1
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    words: frozenset[str] = frozenset()
    table: dict[str, int] = attrs.field(factory=dict, eq=True)


@attrs.frozen
class One:
    """A class with one field, whose type the tests replace."""

    x: int


def one_with(field_type: Any, default: Any = attrs.NOTHING) -> Any:
    """Another version of ``One``, with the same name and a field of this type."""
    field = attrs.field(type=field_type) if default is attrs.NOTHING else attrs.field(type=field_type, default=default)
    one_type = attrs.make_class("One", {"x": field}, frozen=True)
    one_type.__module__ = __name__
    return one_type


# -- round trips -----------------------------------------------------------------------------------------------------

VALUES = [
    Config(),
    Config(block=128, scale=0.1, name="ä \n\"'", eager=True, order=Order.COLUMNS, mode="exact"),
    Config(tile=Tile(1, 2), tiles=(Tile(3), Tile(4, 5)), limit=3, either="word", sizes=(1, 2, 3), pair=(2, "b")),
    Config(words=frozenset({"b", "a", "c"}), table={"z": 1, "a": 2}, scale=1e-300, block=-(2**70)),
    Tile(3, 4),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_back_exactly(value: Any) -> None:
    text = to_json(value)
    copy = from_json(text, type(value))
    assert copy == value
    assert type(copy) is type(value)
    assert stable_json(copy) == stable_json(value)
    assert to_json(copy) == text


def test_the_json_of_a_configuration() -> None:
    assert json.loads(to_json(Tile(3))) == {"schema": 2, "fields": {"rows": 3, "columns": 8}}


@given(
    st.builds(
        Config,
        block=st.integers(),
        scale=st.floats(allow_nan=False, allow_infinity=False),
        name=st.text(),
        eager=st.booleans(),
        order=st.sampled_from(Order),
        mode=st.sampled_from(["fast", "exact"]),
        tile=st.builds(Tile, st.integers(), st.integers()),
        tiles=st.lists(st.builds(Tile, st.integers(), st.integers()), max_size=3).map(tuple),
        limit=st.none() | st.integers(),
        either=st.integers() | st.text(),
        sizes=st.lists(st.integers(), max_size=3).map(tuple),
        pair=st.tuples(st.integers(), st.text()),
        words=st.frozensets(st.text()),
        table=st.dictionaries(st.text(), st.integers(), max_size=3),
    )
)
def test_any_configuration_is_read_back(config: Config) -> None:
    copy = from_json(to_json(config), Config)
    assert copy == config
    assert stable_json(copy) == stable_json(config)


@pytest.mark.parametrize("field_type", [Any, np.dtype, type, jax.typing.DTypeLike, np.dtype | None, "np.dtype"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "int4"])
def test_all_forms_of_a_dtype_are_written_alike(field_type: Any, name: str) -> None:
    one_type = one_with(np.dtype if field_type == "np.dtype" else field_type)
    forms = [np.dtype(name), getattr(jnp, name if name != "bool" else "bool_"), np.dtype(name).type]
    texts = set()
    for form in forms:
        text = to_json(one_type(form))
        assert from_json(text, one_type).x == np.dtype(name)
        assert isinstance(from_json(text, one_type).x, np.dtype)
        texts.add(text)
    assert len(texts) == 1
    assert json.loads(texts.pop())["fields"] == {"x": {"!dtype": name}}


def test_the_byte_order_of_a_dtype_is_read_back() -> None:
    one_type = one_with(Any)
    assert from_json(to_json(one_type(np.dtype(">f4"))), one_type).x == np.dtype(">f4") != np.dtype("<f4")


def test_the_name_of_a_dtype_stays_a_string() -> None:
    one_type = one_with(Any)
    assert from_json(to_json(one_type("float32")), one_type).x == "float32"
    assert type(from_json(to_json(one_type("float32")), one_type).x) is str


def test_an_int_in_a_float_field_is_read_back_as_a_float() -> None:
    assert from_json(to_json(Config(scale=2)), Config).scale == 2.0


def test_none_can_be_a_configuration() -> None:
    assert from_json(to_json(None), type(None)) is None
    with pytest.raises(RecordError, match=r"\$\.fields is null, and Tile is wanted"):
        from_json(to_json(None), Tile)
    with pytest.raises(RecordError, match=r'\$\.fields is {"columns": 8, "rows": 16}, and nothing is wanted'):
        from_json(to_json(Tile()), type(None))


@pytest.mark.long
def test_the_json_is_the_same_in_every_process() -> None:
    code = "from tests.test_records import *; print([to_json(value) for value in VALUES])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


# -- documents of other versions -------------------------------------------------------------------------------------


def error_message(text: str, config_type: Any) -> str:
    with pytest.raises(RecordError) as error:
        from_json(text, config_type)
    assert not error.value.damaged
    return str(error.value)


@attrs.frozen
class Nested:
    tiles: tuple[Tile, ...] = (Tile(),)
    extra: dict[str, Tile] = attrs.field(factory=dict)


def edited_json(value: Any, edit: Any) -> str:
    data = json.loads(to_json(value))
    edit(data)
    return json.dumps(data)


def test_a_renamed_field_is_refused() -> None:
    text = edited_json(Tile(), lambda d: d["fields"].update(lines=d["fields"].pop("rows")))
    assert error_message(text, Tile) == "extra fields found (lines) @ $.fields"


def test_a_missing_field_is_refused_even_with_a_default() -> None:
    assert (
        error_message(edited_json(Tile(), lambda d: d["fields"].pop("columns")), Tile) == "$.fields.columns is missing"
    )
    assert (
        error_message(edited_json(One(1), lambda d: d["fields"].clear()), One) == "required field missing @ $.fields.x"
    )


def test_an_extra_field_beside_the_fields_is_refused() -> None:
    assert error_message(edited_json(Tile(), lambda data: data.update(kernel="op.a")), Tile) == "$.kernel is unknown"


def test_an_extra_field_is_refused() -> None:
    assert (
        error_message(edited_json(Tile(), lambda d: d["fields"].update(depth=3)), Tile)
        == "extra fields found (depth) @ $.fields"
    )


def test_the_error_has_the_full_path() -> None:
    text = edited_json(Nested((Tile(), Tile())), lambda d: d["fields"]["tiles"][1].update(rows="many"))
    assert error_message(text, Nested) == "invalid literal for int() with base 10: 'many' @ $.fields.tiles[1].rows"
    text = edited_json(Nested(extra={"a": Tile()}), lambda d: d["fields"]["extra"]["a"].pop("rows"))
    assert error_message(text, Nested) == "$.fields.extra.a.rows is missing"
    text = edited_json(Nested((Tile(), Tile())), lambda d: d["fields"]["tiles"][1].update(rows="3"))
    assert error_message(text, Nested) == '$.fields.tiles[1].rows is "3"; of its type it would be 3'


@pytest.mark.parametrize(
    ("field_type", "value", "message"),
    [
        (int, "3", '$.fields.x is "3"; of its type it would be 3'),
        (int, 3.0, "$.fields.x is 3.0; of its type it would be 3"),
        (int, 3.5, "$.fields.x is 3.5; of its type it would be 3"),
        (int, True, "$.fields.x is true; of its type it would be 1"),
        (float, "1.5", '$.fields.x is "1.5"; of its type it would be 1.5'),
        (float, True, "$.fields.x is true; of its type it would be 1.0"),
        (bool, 1, "$.fields.x is 1; of its type it would be true"),
        (bool, "", '$.fields.x is ""; of its type it would be false'),
        (str, 3, '$.fields.x is 3; of its type it would be "3"'),
        (str, None, '$.fields.x is null; of its type it would be "None"'),
        (int, None, "$.fields.x"),
        (int, [3], "$.fields.x"),
        (int, {}, "$.fields.x"),
        (tuple[int, ...], {"1": 2}, "$.fields.x"),
        (tuple[int, ...], 3, "$.fields.x"),
        (tuple[int, ...], [1, "2"], '$.fields.x[1] is "2"; of its type it would be 2'),
        (tuple[int, int], [1], "$.fields.x"),
        (tuple[int, ...], "12", "$.fields.x"),
        (Literal["a", "b"], "c", "c not in literal"),
        (Order, "diagonal", "'diagonal' is not a valid Order"),
        (int | None, "3", '$.fields.x is "3"; of its type it would be 3'),
        (Tile, 3, "$.fields.x"),
        (Tile, None, "$.fields.x"),
        (np.dtype, "float32", "$.fields.x"),
        (np.dtype, {"!dtype": "float33"}, "$.fields.x"),
        (Any, {"!dtype": "float33"}, "$.fields.x"),
        (frozenset[str], ["b", "a"], '$.fields.x[0] is "b"; of its type it would be "a"'),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(field_type: Any, value: Any, message: str) -> None:
    one_type = one_with(field_type)
    text = json.dumps({"schema": 2, "fields": {"x": value}})
    assert message in error_message(text, one_type)
    assert "$.fields.x" in error_message(text, one_type)


def test_a_validator_of_the_class_is_applied() -> None:
    def even(instance: Any, attribute: Any, value: int) -> None:
        if value % 2:
            raise ValueError(f"{value} is odd")

    one_type = attrs.make_class("One", {"x": attrs.field(type=int, validator=even)}, frozen=True)
    one_type.__module__ = __name__
    assert "3 is odd" in error_message(to_json(One(3)), one_type)
    assert from_json(to_json(One(4)), one_type).x == 4


def test_the_fields_of_another_class_are_refused() -> None:
    assert "extra fields found (x)" in error_message(to_json(One(1)), Tile)


@pytest.mark.parametrize("schema", [0, 1, 3, "2", None, True, 2.0])
def test_another_schema_is_refused(schema: Any) -> None:
    text = edited_json(Tile(), lambda d: d.update(schema=schema))
    assert error_message(text, Tile) == f"$.schema is {schema!r}; this version reads 2"
    assert "$.schema is None" in error_message(edited_json(Tile(), lambda d: d.pop("schema")), Tile)


def test_a_document_without_fields_is_refused() -> None:
    assert error_message(edited_json(Tile(), lambda d: d.pop("fields")), Tile) == "$ lacks fields"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        (to_json(Tile())[:-3], "not JSON"),
        ("\0\0\0", "not JSON"),
        ("[1]", "$ is a list, not an object"),
        ("null", "$ is a NoneType, not an object"),
        ("[" * 100_000, "not JSON"),
        (to_json(Tile()).replace("16", "NaN"), "not JSON: NaN is not a number"),
        (to_json(Tile()).replace("16", "-Infinity"), "not JSON: -Infinity is not a number"),
        (to_json(Tile()).replace("16", "9" * 5000), "not JSON"),
        (to_json(Tile()).replace("16", "1e999"), "not JSON: 1e999 is too large for a number"),
    ],
)
def test_invalid_json_is_damaged(text: str, message: str) -> None:
    with pytest.raises(RecordError) as error:
        from_json(text, Tile)
    assert message in str(error.value)
    assert error.value.damaged


# -- values that cannot be written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, "cannot be written down"),
        (len, "cannot be written down"),
        (functools.partial(max, 1), "cannot be written down"),
        (jnp.ones(2), "cannot be written down"),
        (np.ones(2), "cannot be written down"),
        (np.int64(3), "cannot be written down"),
        (float("nan"), "Out of range float values"),
        (float("inf"), "Out of range float values"),
        (object(), "cannot be written down"),
        (1j, "cannot be written down"),
        (dict, "<class 'dict'> is not a dtype"),
        (int, "<class 'int'> is not a dtype"),
        (Tile, "Tile'> is not a dtype"),
        ((1, 2), "would be read back as"),
        ([jnp.float32], "would be read back as"),
        ({"!dtype": "float32"}, "would be read back as"),
        (Order.ROWS, "would be read back as"),
        (Tile(), "would be read back as"),
        (np.dtype([("a", "f4")]), "cannot be written down: .* is not a dtype of numbers"),
        ({1: 2}, "would be read back as"),
    ],
)
def test_a_value_that_would_not_be_read_back_is_refused(value: Any, message: str) -> None:
    one_type = one_with(Any)
    with pytest.raises(RecordError, match=message):
        to_json(one_type(value))


@pytest.mark.parametrize(
    ("field_type", "value", "message"),
    [
        (int, True, r"\$.x is true; of its type it would be 1"),
        (int, 3.0, r"\$.x is 3.0; of its type it would be 3"),
        (str, 3, r'\$.x is 3; of its type it would be "3"'),
        (Literal["a"], "b", "b not in literal"),
        (np.dtype, "float32", "'float32' is not a dtype"),
    ],
)
def test_a_field_that_is_not_of_its_type_is_refused(field_type: Any, value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        to_json(one_with(field_type)(value))


@attrs.frozen
class DeepTile(Tile):  # type: ignore[misc]
    depth: int = 3


def test_a_subclass_in_a_field_is_refused() -> None:
    with pytest.raises(RecordError, match="would be read back as"):
        to_json(Nested((DeepTile(),)))


@pytest.mark.parametrize("value", [3, "word", (1, 2), {"block": 3}, Tile, object()])
def test_a_configuration_without_fields_is_refused(value: Any) -> None:
    with pytest.raises(RecordError, match="a configuration is an attrs class or a dataclass; got"):
        to_json(value)


# -- records ---------------------------------------------------------------------------------------------------------


def key(problem: Any = "p") -> Key:
    return Key("op", "cpu", stable_json(problem))


PROVENANCE = Provenance(
    when="2026-11-20T12:00:00+00:00",
    device="cpu (1)",
    milliseconds=0.25,
    backends=("a", "b"),
    software={"jax": "1.0"},
    tried=(("a Tile(1, 2)", 0.25), ("b Tile(3, 4)", "out of memory"), ("c", 1)),
)


@pytest.mark.parametrize(
    "record",
    [Record(Tile(1, 2)), Record(Tile(1, 2), "a"), Record(Tile(1, 2), "a", PROVENANCE), Record(None, "a", PROVENANCE)],
)
def test_a_record_is_read_back(record: Record) -> None:
    text = record_to_json(key(), record)
    config_type = None if record.cfg is None else Tile
    assert record_from_json(text, key(), config_type) == record
    document = json.loads(text)
    assert document["kernel"] == (None if record.backend is None else "op.a")
    # The record of a kernel names no module, because the kernel's module may move.
    assert document.pop("type", None) == (f"{__name__}.Tile" if record.backend is None else None)
    assert set(document) == {"schema", "problem", "kernel", "config", "provenance"}


def test_a_record_without_a_kernel_is_read_only_as_its_type() -> None:
    with pytest.raises(RecordError, match=rf"\$.type is '{__name__}.Tile', not '{__name__}.One'"):
        record_from_json(record_to_json(key(), Record(Tile())), key(), One)


def test_a_record_of_another_problem_is_refused() -> None:
    text = record_to_json(key(), Record(Tile()))
    with pytest.raises(RecordError, match=r"\$.problem is another one than that of the key"):
        record_from_json(text, key("q"), Tile)


@pytest.mark.parametrize(
    ("software", "changes"),
    [
        ({"jax": "1.0"}, ""),
        ({"jax": "1.0", "triton": "3.6"}, ""),  # the record has no version of triton
        ({}, ""),
        ({"jax": "2.0"}, "jax was 1.0, is 2.0"),
        ({"op.b": "2", "op.a": "1", "jax": "2.0"}, "jax was 1.0, is 2.0, op.b was 1, is 2"),
    ],
)
def test_changes_of_software_versions(software: dict[str, str], changes: str) -> None:
    provenance = attrs.evolve(PROVENANCE, software={"jax": "1.0", "op.a": "1", "op.b": "1"})
    assert provenance.changes(software) == changes


def record_with(part: str, value: Any) -> str:
    return json.dumps({**json.loads(record_to_json(key(), Record(Tile(), "a", PROVENANCE))), part: value})


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("kernel", 3, "$.kernel is 3, not a kernel of op"),
        ("kernel", "another.a", '$.kernel is "another.a", not a kernel of op'),
        ("config", 3, "$.config"),
        ("config", {"rows": 3}, "$.config.columns is missing"),
        ("config", None, "$.config is null, and Tile is wanted"),
        ("provenance", {}, "required field missing @ $.provenance.when"),
        ("provenance", 3, "$.provenance"),
        ("schema", 3, "$.schema is 3; this version reads 2"),
        ("shortfall", None, "$.shortfall is unknown"),
    ],
)
def test_the_error_of_an_invalid_record_has_the_path(part: str, value: Any, message: str) -> None:
    with pytest.raises(RecordError) as error:
        record_from_json(record_with(part, value), key(), Tile)
    assert message in str(error.value)
    assert not error.value.damaged


@pytest.mark.parametrize(
    "when",
    ["0000-01-01T00:00:00+00:00", "0001-01-01", "1969-12-31", "2242-03-01T12:00:00+00:00", "9999-12-31", "", "today"],
)
def test_a_record_of_a_time_at_which_nothing_was_measured_is_refused(when: str) -> None:
    provenance = json.loads(record_with("schema", 2))["provenance"]
    with pytest.raises(RecordError) as error:
        record_from_json(record_with("provenance", {**provenance, "when": when}), key(), Tile)
    assert str(error.value) == (f'$.provenance.when is "{when}"; it takes the time of a measurement, as ISO 8601')


@pytest.mark.parametrize("time", ["-5.0", "-5", "9" * 400, "1e999", "NaN", "Infinity", "null", "true", "[]"])
@pytest.mark.parametrize("field", ["milliseconds", "tried", "budget_s"])
def test_a_record_with_a_time_that_nothing_takes_is_refused(field: str, time: str) -> None:
    provenance = attrs.evolve(
        PROVENANCE, milliseconds=0.25, tried=(("a Tile(1, 2)", 0.25), ("b", 0.375)), shortfall=Shortfall(1, 0.5)
    )
    text = record_to_json(key(), Record(Tile(), "a", provenance))
    old = {"milliseconds": '"milliseconds": 0.25', "tried": "0.375", "budget_s": '"budget_s": 0.5'}[field]
    assert text.count(old) == 1
    assert record_from_json(text, key(), Tile).provenance == provenance
    with pytest.raises(RecordError, match=r"\$\.provenance|^not JSON") as error:
        record_from_json(text.replace(old, f"{old.rpartition(' ')[0]} {time}"), key(), Tile)
    assert field in str(error.value) or "JSON" in str(error.value)


#: Half of a character: a lone surrogate, which is no Unicode.
HALF = "\ud800"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("problem", {"device": ["cpu", HALF]}),
        ("kernel", f"op.{HALF}"),
        ("config", {"rows": HALF, "columns": 8}),
        ("provenance", {HALF: 3}),
        ("more", [[HALF]]),
    ],
)
def test_a_record_with_half_of_a_character_is_damaged(part: str, value: Any) -> None:
    with pytest.raises(RecordError, match=r'^a text in it has half of a character, "\\ud800"$') as error:
        record_from_json(record_with(part, value), key(), Tile)
    assert error.value.damaged
    pair = json.loads(json.dumps("\U0001f600"))
    assert record_from_json(record_with("kernel", f"op.{pair}"), key(), Tile).backend == "\U0001f600"


@pytest.mark.parametrize(
    ("key_of_call", "record"),
    [
        (key(HALF), Record(Tile(), "a")),
        (key(), Record(Tile(), HALF)),
        (key(), Record(Tile(), "a", attrs.evolve(PROVENANCE, device=HALF))),
    ],
)
def test_a_record_with_half_of_a_character_is_not_written(key_of_call: Key, record: Record) -> None:
    with pytest.raises(RecordError, match=r'has half of a character, "\\ud800"$'):
        record_to_json(key_of_call, record)


@pytest.mark.parametrize("outcome", [math.nan, math.inf, -1.0, None, True])
def test_a_provenance_takes_times_and_reasons_of_what_was_tried(outcome: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^tried\[1\]: takes a (finite )?number"):
        attrs.evolve(PROVENANCE, tried=(("a", "slower"), ("b", outcome)))


def test_a_record_that_is_for_something_else_constructs_no_configuration() -> None:
    made: list[int] = []

    @attrs.frozen
    class Noticed:
        rows: int = attrs.field(validator=lambda *_: made.append(1))
        columns: int = 0

    for part, value in (("kernel", "another.a"), ("problem", {}), ("schema", 3), ("provenance", 3), ("more", 1)):
        with pytest.raises(RecordError):
            record_from_json(record_with(part, value), key(), Noticed)
    assert made == []
    record_from_json(record_with("schema", 2), key(), Noticed)
    assert made == [1]


@pytest.mark.parametrize("part", ["problem", "kernel", "config", "provenance"])
def test_a_record_without_a_part_is_damaged(part: str) -> None:
    data = json.loads(record_to_json(key(), Record(Tile())))
    del data[part]
    with pytest.raises(RecordError, match=rf"\$ lacks {part}") as error:
        record_from_json(json.dumps(data), key(), Tile)
    assert error.value.damaged


def test_keys_compare_by_content() -> None:
    assert key() == key()
    assert hash(key()) == hash(key())
    assert key().digest == hashlib.sha256(key().problem.encode()).hexdigest()[:16] != key("q").digest
    assert str(key()) == f"op {key().digest}"


def test_keys_of_one_kind_differ_only_in_sizes() -> None:
    first, second = (key({"arguments": ["batch", 8], "sizes": {"batch": size}}) for size in (2, 3))
    assert (first.sizes, second.sizes) == ({"batch": 2}, {"batch": 3})
    assert first.kind == second.kind == key({"arguments": ["batch", 8]}).kind
    assert first.kind != key({"arguments": ["batch", 9], "sizes": {"batch": 2}}).kind
    assert key({"arguments": ["batch", 8]}).sizes == {}


@pytest.mark.parametrize("problem", ["", "[1]", "{", '"text"', "[" * 100_000, '{"sizes": 3}', '{"sizes": {"a": "b"}}'])
def test_a_key_with_any_text_has_a_kind(problem: str) -> None:
    assert Key("op", "cpu", problem).sizes == {}
    assert len(Key("op", "cpu", problem).kind) == 16


# -- provenance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(seconds=3), "just now"),
        (timedelta(seconds=-30), "just now"),
        (timedelta(seconds=61), "1 minute ago"),
        (timedelta(minutes=59, seconds=50), "59 minutes ago"),
        (timedelta(hours=1, seconds=5), "1 hour ago"),
        (timedelta(hours=47), "1 day ago"),
        (timedelta(days=400), "400 days ago"),
    ],
)
def test_a_provenance_has_its_age_in_words(age: timedelta, text: str) -> None:
    when = (datetime.now(UTC) - age).isoformat()
    assert str(attrs.evolve(PROVENANCE, when=when)) == f"measured {text} on cpu (1): 0.25 ms"


@pytest.mark.parametrize("when", ["last week", "2026-11-20T12:00:00", ""])
def test_an_invalid_time_is_shown_unchanged(when: str) -> None:
    assert str(attrs.evolve(PROVENANCE, when=when)) == f"measured at {when} on cpu (1): 0.25 ms"
