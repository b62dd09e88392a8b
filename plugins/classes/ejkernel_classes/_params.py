"""Parameters that kernels have in common, as frozen values; and hashes of values by content."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
from attrs.validators import ge, instance_of, optional

from ._content import stable_json

Params = TypeVar("Params", bound="_Params")


def _is_positive_int(instance: Any, attribute: Any, value: Any) -> None:
    instance_of(int)(instance, attribute, value)
    if isinstance(value, bool):
        raise TypeError(f"{attribute.name}: takes a whole number; got {value}")
    ge(1)(instance, attribute, value)


def _size() -> Any:
    """A field for a positive int, or None for the kernel's own choice."""
    return attrs.field(default=None, validator=optional(_is_positive_int))


@attrs.frozen
class _Params:
    def to_dict(self) -> dict[str, int]:
        """The fields that are not None, by name."""
        return {name: value for name, value in attrs.asdict(self).items() if value is not None}

    @classmethod
    def merge(cls: type[Params], base: Params | None, override: Params | None) -> Params:
        """The fields of both; where both have a value, that of ``override``."""
        return cls(**{**(base.to_dict() if base else {}), **(override.to_dict() if override else {})})


@attrs.frozen
class FwdParams(_Params):
    """Block sizes and launch parameters of a forward pass. None leaves the choice to the kernel.

    >>> FwdParams.merge(FwdParams(q_blocksize=128, num_warps=4), FwdParams(num_warps=8)).to_dict()
    {'q_blocksize': 128, 'num_warps': 8}
    """

    blocksize_m: int | None = _size()
    blocksize_k: int | None = _size()
    blocksize_n: int | None = _size()
    q_blocksize: int | None = _size()
    kv_blocksize: int | None = _size()
    blocksize_heads: int | None = _size()
    blocksize_keys: int | None = _size()
    num_key_splits: int | None = _size()
    num_warps: int | None = _size()
    num_stages: int | None = _size()


@attrs.frozen
class BwdParams(_Params):
    """Block sizes and launch parameters of a backward pass. None leaves the choice to the kernel."""

    blocksize_m: int | None = _size()
    blocksize_k: int | None = _size()
    blocksize_n: int | None = _size()
    q_blocksize: int | None = _size()
    kv_blocksize: int | None = _size()
    num_warps: int | None = _size()
    num_stages: int | None = _size()

    @classmethod
    def from_fwd_params(cls, fwd: FwdParams, scale: float = 0.5) -> BwdParams:
        """The forward's parameters with scaled blocks: powers of two, and at least 16. A block of None counts as 128.

        >>> BwdParams.from_fwd_params(FwdParams(q_blocksize=96, num_warps=4)).to_dict()
        {'q_blocksize': 32, 'kv_blocksize': 64, 'num_warps': 4}
        """
        if not scale > 0:
            raise ValueError(f"scale: takes a number above 0; got {scale}")
        q_block, kv_block = (_block((size or 128) * scale) for size in (fwd.q_blocksize, fwd.kv_blocksize))
        return cls(q_blocksize=q_block, kv_blocksize=kv_block, num_warps=fwd.num_warps, num_stages=fwd.num_stages)


def _block(size: float) -> int:
    """The greatest power of two up to ``size``, and at least 16."""
    return max(16, 1 << (max(int(size), 1).bit_length() - 1))


def get_safe_hash_int(text: Any, algorithm: str = "md5") -> int:
    """The digest of ``str(text)`` by one of ``hashlib``'s algorithms, as a whole number.

    >>> get_safe_hash_int("test") == int("098f6bcd4621d373cade4e832627b4f6", 16)
    True
    """
    try:
        digest = hashlib.new(algorithm, str(text).encode(), usedforsecurity=False).digest()
    except (ValueError, TypeError) as fault:  # unknown, or without a fixed length, such as shake_128
        raise ValueError(f"algorithm: takes one of hashlib's with a fixed length; got {algorithm!r}") from fault
    return int.from_bytes(digest, "big")


def hash_fn(self: Any) -> int:
    """A hash of the type's name and of the fields with their names. It is the same in every process.

    >>> hash_fn(FwdParams(q_blocksize=12, kv_blocksize=3)) == hash_fn(FwdParams(q_blocksize=1, kv_blocksize=23))
    False
    """
    kind = type(self)
    if attrs.has(kind):
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(kind) if field.eq}
    elif dataclasses.is_dataclass(kind):
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(kind) if field.compare}
    else:
        fields = dict(vars(self))
    return get_safe_hash_int(stable_json([kind.__qualname__, _normal(fields)]))


def _normal(value: Any) -> Any:
    """The value with equal numbers made the same: 1, 1.0 and True."""
    if isinstance(value, Mapping):
        return {key: _normal(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_normal, value)) if type(value) in (list, tuple) else value
    if isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value
