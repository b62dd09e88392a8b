"""Names of operations, backends and devices as folders: they stay inside, and they stay apart."""

from __future__ import annotations

import os
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel_cache._names import MAX_LENGTH, below, component, decode_component, place_of
from ejkernel_core import Key

SAFE = frozenset(string.ascii_letters + string.digits + "._-%")

NASTY = [
    "",
    "any",
    "empty",
    ".",
    "..",
    "...",
    "/",
    "\\",
    "a/b",
    "../../etc",
    "C:",
    "\0",
    "%",
    "%any",
    "%empty",
    "%2E",
    "~",
    "a b",
    "é",
]
NASTY += ["CON", "x" * 119, "x" * 120, "x" * 121, "x" * 5000, "é" * 100, "." * 300, "\ud800", "\U0001f600" * 90]

names = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=8),
    st.text(alphabet="./\\%.~aA2Ee\0:", max_size=6),
    st.text(alphabet="ab/", min_size=100, max_size=200),
)


@given(names)
def test_a_component_is_one_plain_name(name):
    part = component(name)
    assert set(part) <= SAFE
    assert 0 < len(part) <= MAX_LENGTH
    assert not part.startswith(".")


@given(st.one_of(st.none(), names), st.one_of(st.none(), names))
def test_different_names_have_different_components(one, other):
    assert (component(one) == component(other)) is (one == other)


def test_the_nasty_ones_are_all_apart():
    assert len({component(name) for name in [None, *NASTY]}) == len(NASTY) + 1
    long = ["x" * 5000 + end for end in ("", "a", "b")]
    assert len({component(name) for name in long}) == 3


@given(names)
def test_a_component_is_read_back_unless_it_is_cut(name):
    back = decode_component(component(name))
    assert back == name or (back is None and len(component(name)) > 80)


@given(names, names, st.one_of(st.none(), names))
def test_no_place_is_outside(op, device, backend):
    root = Path("/some/cache")
    path = below(root, place_of(Key(op, device, "{}"), backend))
    assert os.path.normpath(path) == str(path)
    assert path.parents[3] == root
    assert path.suffix == ".json"


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_no_two_places_are_one(one, other):
    places = [place_of(Key(op, device, "{}"), backend) for op, device, backend in (one, other)]
    assert (places[0] == places[1]) is (one == other)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("flash_attention", "flash_attention"),
        ("NVIDIA H200", "NVIDIA%20H200"),
        ("..", "%2E."),
        ("a/b", "a%2Fb"),
        ("", "%empty"),
        (None, "%any"),
        ("%any", "%25any"),
    ],
)
def test_a_person_can_read_it(name, part):
    assert component(name) == part
