"""``ejkernel.xla_utils.utils``: packed sequences."""

from __future__ import annotations

from ejkernel_packed import (
    cdiv,
    identity_dtype_convert,
    mask_to_segment_ids,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
    segment_ids_to_mask,
)

__all__ = [
    "cdiv",
    "identity_dtype_convert",
    "mask_to_segment_ids",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "segment_ids_to_mask",
]
