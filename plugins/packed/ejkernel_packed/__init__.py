"""Packed sequences: the tokens of many sequences in one axis, with boundaries ``[0, len1, len1 + len2, ...]``.

Sequences may be empty, and there may be none. Eagerly, the values of all arguments are checked. Under ``jit`` the
values are unknown: the caller has to pass the static size of the result, and boundaries that do not start at 0 or that
decrease give undefined results, and no error. Tokens after the last boundary are padding.
"""

from __future__ import annotations

from ._arrays import chunk_array, unchunk_array
from ._chunks import prepare_chunk_indices, prepare_chunk_offsets
from ._gradient import identity_dtype_convert
from ._lengths import cdiv, prepare_cu_seqlens_from_mask, prepare_lens, prepare_lens_from_mask
from ._masks import mask_to_segment_ids, segment_ids_to_mask
from ._packing import pack, unpack
from ._rows import Rows, pack_rows
from ._tokens import (
    cu_seqlens_from_segment_ids,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
    segment_ids_from_cu_seqlens,
)

__all__ = [
    "Rows",
    "cdiv",
    "chunk_array",
    "cu_seqlens_from_segment_ids",
    "identity_dtype_convert",
    "mask_to_segment_ids",
    "pack",
    "pack_rows",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "segment_ids_from_cu_seqlens",
    "segment_ids_to_mask",
    "unchunk_array",
    "unpack",
]
