"""Labels that survive compilation: what a compiled program calls, read out of its text.

Every call leaves its operation, its kernel, its arguments' shapes and its configuration in the names of the
instructions it becomes. XLA keeps these names; of the characters in them, it cuts at "@" and splits at "/".
"""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import jax

from ._errors import RecordError
from ._keys import abstractify, stable_json
from ._plan import Plan
from ._records import to_json

#: What a label starts with; then what it is of, and what it says, all between these.
MARK = "ejk~"
_LABEL = re.compile(r"ejk~(call|label)~([\w.-]+)(?:~([\w=-]+))?")

Function = TypeVar("Function", bound=Callable[..., Any])


@attrs.frozen
class Label:
    """One label that was found. Of a call, it tells the operation, the kernel, the arguments and the configuration."""

    name: str
    #: None for a label that ``label`` made.
    backend: str | None = None
    #: The arguments that were given: "float32[2,128,8,64]" for an array, anything else as JSON.
    arguments: tuple[tuple[str, Any], ...] = ()
    #: The configuration as ``to_json`` writes it.
    config: str | None = None

    def __str__(self) -> str:
        if self.backend is None:
            return self.name
        inside = ", ".join(f"{name}={value}" for name, value in self.arguments)
        return f"{self.name}.{self.backend}({inside}) with {self.config}"


def label(name: str) -> Callable[[Function], Function]:
    """Mark everything that a function does, so that it is found in compiled code.

    >>> @label("my_attention")
    ... def double(x):
    ...     return x * 2
    >>> find_labels_in_lowered(jax.jit(double).lower(1.0))
    [Label(name='my_attention', backend=None, arguments=(), config=None)]
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"label: takes letters, digits, '_', '.' and '-', which survive compilation; got {name!r}")

    def mark(function: Function) -> Function:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(f"{MARK}label~{name}"):
                return function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    return mark


def label_of(plan: Plan) -> str:
    """The label of a planned call."""
    try:
        content: dict[str, Any] = {"c": json.loads(to_json(plan.cfg))}
    except RecordError:  # a configuration that cannot be written down leaves its name alone
        content = {"c": str(plan.cfg)}
    content["n"] = plan.kernel.name
    content["a"] = {name: _plain(value) for name, value in plan.invocation.arguments.items() if value is not None}
    packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)
    return f"{MARK}call~{re.sub(r'[^A-Za-z0-9_.-]', '_', plan.kernel.name)}~{base64.urlsafe_b64encode(packed).decode()}"


def _plain(value: Any) -> Any:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        return json.loads(stable_json(abstractify(value)))
    except TypeError:
        return str(value)


def find_labels_in_lowered(lowered: Any) -> list[Label]:
    """The labels of a ``jax.stages.Lowered`` or ``Compiled``, each once, in the order of the text.

    >>> twice = jax.jit(label("twice")(lambda x: x * 2))
    >>> [found.name for found in find_labels_in_lowered(twice.lower(1.0))]
    ['twice']
    """
    if isinstance(lowered, jax.stages.Lowered):
        return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))
    return extract_labels_from_hlo_text(lowered.as_text())


def extract_labels_from_hlo_text(hlo_text: str) -> list[Label]:
    """The labels of a text, StableHLO with locations or HLO, which another process may have written.

    >>> extract_labels_from_hlo_text('op_name="jit(f)/ejk~label~my_attention/mul"')
    [Label(name='my_attention', backend=None, arguments=(), config=None)]
    """
    return list(dict.fromkeys(_read(*found.groups()) for found in _LABEL.finditer(hlo_text)))


def _read(kind: str, name: str, packed: str | None) -> Label:
    if kind == "label" or packed is None:
        return Label(name)
    try:
        content = json.loads(zlib.decompress(base64.urlsafe_b64decode(packed)))
    except (ValueError, zlib.error):  # cut off, or nothing of ours
        return Label(name)
    op, _, backend = content["n"].rpartition(".")
    arguments = tuple((name, _hashable(value)) for name, value in content["a"].items())
    return Label(op, backend, arguments, json.dumps(content["c"], sort_keys=True))


def _hashable(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value
