"""What other libraries call the arguments of attention over pages, for the error of an unknown argument."""

from __future__ import annotations

_BY_NAME = {
    "query": "q queries",
    "kv_lens": "kv_len kv_lengths seq_lens seq_len seqlens_k seqused_k cache_seqlens context_lens seq_lens_k "
    "sequence_lengths key_value_seq_lengths",
    "block_tables": "block_table page_table page_indices page_ids pages_tables page_tables sequence_page_indices",
    "query_start_loc": "cu_q_lens cu_seqlens_q cum_seqlens_q cu_query_lens qo_indptr cumulative_query_lengths",
    "num_seqs": "num_sequences n_seqs num_requests num_reqs",
    "softmax_aux": "sinks s_aux attention_sinks sink attention_sink learnable_sink",
    "softmax_scale": "scale sm_scale scaling",
    "causal": "is_causal use_causal_mask",
    "sliding_window": "window window_size",
    "logits_soft_cap": "softcap soft_cap logit_cap logit_soft_cap logits_cap",
    "q_scale": "q_descale query_scale",
    "k_scale": "k_descale key_scale",
    "v_scale": "v_descale value_scale",
    "max_query_len": "max_seqlen_q max_q_len max_query_length",
    "split_size": "fixed_split_size",
    "metadata": "scheduler_metadata tile_scheduler_metadata attn_metadata",
    "first_page": "layer layer_id page_offset",
    "return_lse": "return_softmax_lse return_logsumexp return_residuals",
    "backend": "implementation impl platform",
}
_TYPED = "ejkernel_ops.ragged_paged_attention takes kv_pages=(key_pages, value_pages)"
A_PAIR = f"{_TYPED}, and ejkernel_core.call(...) takes key_pages and value_pages by name"

#: What is said of names that no argument here has, by these names.
_HINTS = {
    "attention over pages has no alibi": "alibi_slopes alibi",
    "attention over pages has no bias": "qq_bias bias attn_bias",
    "attention over pages has no mask of its own": "attention_mask mask attn_mask custom_mask",
    "attention over pages has no dropout": "dropout_p dropout_prob dropout_rate dropout",
    "the core chooses the splits; 'split_size' fixes their size": "num_splits num_kv_splits max_num_splits",
    "'kv_pages' takes the keys and values, into which update_kv_pages has written those of new tokens": "k key keys "
    "v value values",
    "update_kv_pages takes it, before the call": "slot_mapping num_kv_update_slices",
    "call update_kv_pages before, or leave it out": "update_kv_cache skip_kv_update",
    "'num_seqs' takes its last number": "distribution",
    "'query_start_loc' says where the last tokens end": "num_actual_tokens num_tokens",
    "'kv_lens' takes the keys of each sequence": "cu_seqlens_k cu_kv_lens cum_seqlens_k",
    "leave it out: there is no longest length to give": "max_seqlen_k max_seq_len max_kv_len max_seq_len_k",
    "leave it out: sequences may share pages": "use_cascade common_prefix_len prefix_kv_lens suffix_kv_lens",
    "'block_tables' takes the pages of each sequence in a row of its own, and 'kv_lens' the lengths": "kv_indptr "
    "paged_kv_indptr paged_kv_indices paged_kv_last_page_len kv_last_page_len",
    "leave it out: the pages say it": "page_size block_size kv_cache_dtype kv_layout num_kv_heads",
    "leave it out: results are returned": "out output",
    "leave it out: results have the query's dtype": "out_dtype",
    "leave it out: keys that no query sees have no weight": "mask_value",
    "'cfg' takes a kernel's Config": "num_kv_pages_per_block num_queries_per_block chunk_prefill_size "
    "decode_block_sizes prefill_block_sizes d_block_sizes p_block_sizes m_block_sizes config",
    "leave it out: the plugin of a kernel launches it": "vmem_limit_bytes debug_mode interpret",
}

OTHER_NAMES = {
    **{other: name for name, others in _BY_NAME.items() for other in others.split()},
    **dict.fromkeys(("kv_cache", "cache", "pages", "kv_cache_fused"), "kv_pages"),
    **dict.fromkeys(("key_cache", "k_cache", "k_pages", "value_cache", "v_cache", "v_pages"), A_PAIR),
    **{other: hint for hint, others in _HINTS.items() for other in others.split()},
}
