"""Names of operations, backends and devices as folder names: inside the cache, and distinct."""

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

UNUSUAL_NAMES = [
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
UNUSUAL_NAMES += ["CON", "x" * 119, "x" * 120, "x" * 121, "x" * 5000, "é" * 100, "." * 300, "\ud800", "\U0001f600" * 90]

names = st.one_of(
    st.sampled_from(UNUSUAL_NAMES),
    st.text(max_size=8),
    st.text(alphabet="./\\%.~aA2Ee\0:", max_size=6),
    st.text(alphabet="ab/", min_size=100, max_size=200),
)


@given(names)
def test_a_component_is_a_safe_file_name(name):
    text = component(name)
    assert set(text) <= SAFE
    assert 0 < len(text) <= MAX_LENGTH
    assert not text.startswith(".")


@given(st.one_of(st.none(), names), st.one_of(st.none(), names))
def test_different_names_have_different_components(first, second):
    assert (component(first) == component(second)) is (first == second)


def test_unusual_names_have_different_components():
    assert len({component(name) for name in [None, *UNUSUAL_NAMES]}) == len(UNUSUAL_NAMES) + 1
    long_names = ["x" * 5000 + end for end in ("", "a", "b")]
    assert len({component(name) for name in long_names}) == 3


@given(names)
def test_a_component_is_decoded_unless_it_is_shortened(name):
    decoded = decode_component(component(name))
    assert decoded == name or (decoded is None and len(component(name)) > 80)


@given(names, names, st.one_of(st.none(), names))
def test_every_path_is_inside_the_cache(op, device, backend):
    root = Path("/some/cache")
    path = below(root, place_of(Key(op, device, "{}"), backend))
    assert os.path.normpath(path) == str(path)
    assert path.parents[3] == root
    assert path.suffix == ".json"


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_different_places_have_different_paths(first, second):
    paths = [place_of(Key(op, device, "{}"), backend) for op, device, backend in (first, second)]
    assert (paths[0] == paths[1]) is (first == second)


@pytest.mark.parametrize(
    ("name", "text"),
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
def test_components_are_readable(name, text):
    assert component(name) == text
