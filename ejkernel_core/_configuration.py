"""What a configuration may be: a value that stays what it was when it was chosen.

A kernel that changes the one it is given would have another value measured and stored than it ever offered, and the
next call of the same process would run with it.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class _Frozen:
    """Has what attrs gives to every frozen class, and to no other."""


def changeable_type(kind: Any) -> str | None:
    """Why values of this type can be changed, in words; None where they cannot.

    >>> changeable_type(tuple), changeable_type(list)
    (None, 'a list has no hash')
    """
    name = f"a {kind.__qualname__}"
    if attrs.has(kind):
        return None if kind.__setattr__ is _Frozen.__setattr__ else f"{name} is not frozen: use attrs.frozen"
    if hasattr(kind, "__dataclass_params__"):
        return None if kind.__dataclass_params__.frozen else f"{name} is not frozen: use dataclass(frozen=True)"
    if kind.__hash__ is None:
        return f"{name} has no hash"
    is_plain = kind.__hash__ is object.__hash__ and kind.__setattr__ is object.__setattr__
    return f"{name} takes any attribute: use attrs.frozen" if is_plain and kind.__dictoffset__ else None


def changeable(cfg: Any) -> str | None:
    """The same of one value, with all that is in it.

    >>> changeable((128, "fast", None)), changeable(((1, 2), [3]))
    (None, 'a list has no hash')
    """
    if isinstance(cfg, tuple):
        return next(filter(None, map(changeable, cfg)), None)
    reason = changeable_type(type(cfg))
    if reason is None:
        try:
            hash(cfg)
        except Exception as fault:  # a frozen one that holds what is not
            reason = f"a {type(cfg).__qualname__} has no hash: {fault}"
    return reason
