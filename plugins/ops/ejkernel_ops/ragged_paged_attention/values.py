"""For ``validate=True``: the values of lengths, tables and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel_ops.pages import check_scales, pages_of

from .tiles import paged_attention_metadata


def validate(arguments: Mapping[str, Any]) -> None:
    """Raise for lengths, tables and scales that contradict each other or the pages."""
    names = ("kv_lens", "block_tables", "query_start_loc", "num_seqs", "first_page", "q_scale", "k_scale", "v_scale")
    arrays: dict[str, Any] = {name: None if arguments[name] is None else np.asarray(arguments[name]) for name in names}
    pages, tokens = pages_of(arguments)[0], arguments["query"].shape[0]
    check_scales(arrays, "q_scale", "k_scale", "v_scale")
    count = _sequence_count(arrays)
    starts = arrays["query_start_loc"].astype(np.int64)[: count + 1]
    lengths = arrays["kv_lens"].astype(np.int64)[:count]
    _check_starts(starts, tokens)
    _check_lengths(lengths, starts, arrays["block_tables"].shape[1] * pages.shape[1])
    _check_tables(arrays, lengths, pages.shape)
    _check_max_query_len(arguments["max_query_len"], starts)
    if arguments["metadata"] is not None:
        _check_metadata(arguments, tokens)


def _check_metadata(arguments: Mapping[str, Any], tokens: int) -> None:
    of_step = (arguments[name] for name in ("kv_lens", "query_start_loc", "num_seqs"))
    if not np.array_equal(arguments["metadata"], paged_attention_metadata(*of_step, num_tokens=tokens)):
        raise ValueError("metadata: is that of other starts or another number of sequences")


def _sequence_count(arrays: Mapping[str, Any]) -> int:
    most, given = len(arrays["kv_lens"]), arrays["num_seqs"]
    if given is None:
        return most
    if not 0 <= given.item() <= most:
        raise ValueError(f"num_seqs: must be from 0 to {most}; got {given.item()}")
    return int(given.item())


def _check_starts(starts: np.ndarray, tokens: int) -> None:
    if starts[0] != 0:
        raise ValueError(f"query_start_loc: begins with 0; got {starts[0]}")
    for place in np.flatnonzero(np.diff(starts) < 0):
        raise ValueError(f"query_start_loc: sequence {place} begins at {starts[place]} and ends at {starts[place + 1]}")
    if starts[-1] > tokens:
        raise ValueError(f"query_start_loc: the last sequence ends at token {starts[-1]}, and there are {tokens}")


def _check_lengths(lengths: np.ndarray, starts: np.ndarray, most: int) -> None:
    for place in np.flatnonzero((lengths < 0) | (lengths > most)):
        raise ValueError(f"kv_lens: sequence {place} has {lengths[place]} keys; its pages hold from 0 to {most}")
    queries = np.diff(starts)
    for place in np.flatnonzero((queries > lengths) & (lengths > 0)):
        raise ValueError(f"kv_lens: sequence {place} has {queries[place]} queries and {lengths[place]} keys")


def _check_tables(arrays: Mapping[str, Any], lengths: np.ndarray, shape: tuple[int, ...]) -> None:
    tables, first_page = arrays["block_tables"].astype(object), arrays["first_page"]
    used = np.arange(tables.shape[1]) < -(-lengths // shape[1])[:, None]
    for place, entry in np.argwhere(used):
        page = tables[place, entry] + (0 if first_page is None else first_page.item())
        if tables[place, entry] < 0 or not 0 <= page < shape[0]:
            raise ValueError(f"block_tables: entry {entry} of sequence {place} is page {page}; there are {shape[0]}")


def _check_max_query_len(most: Any, starts: np.ndarray) -> None:
    longest = int(np.diff(starts).max(initial=0))
    if most is not None and longest > most:
        raise ValueError(f"max_query_len: is {most}, and a sequence has {longest} queries")
