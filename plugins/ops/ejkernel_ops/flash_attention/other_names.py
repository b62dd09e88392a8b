"""What other libraries call the arguments of attention, for the error of an unknown argument."""

from __future__ import annotations

BY_NAME = {
    "query": "q queries Q",
    "key": "k keys K",
    "value": "v values V",
    "bias": "ab attn_bias attention_bias alibi_bias logits_bias",
    "attention_mask": "mask attn_mask",
    "q_segment_ids": "query_segment_ids q_segids",
    "kv_segment_ids": "key_segment_ids k_segment_ids kv_segids",
    "cum_seqlens_q": "cu_seqlens_q cu_seqlens q_seqlens",
    "cum_seqlens_k": "cu_seqlens_k cu_seqlens_kv cum_seqlens_kv kv_seqlens",
    "q_start": "q_offset q_offsets query_offset query_offsets query_start start_pos cache_index cache_position",
    "kv_lengths": "kv_lens kv_len kv_seq_lens seqused_k cache_seqlens cache_lengths context_lens seq_lens "
    "seq_lens_k actual_seq_lengths_kv key_value_seq_lengths",
    "kv_positions": "k_positions key_positions cache_positions k_indices",
    "softmax_aux": "sinks s_aux attention_sinks sink_logits",
    "softmax_scale": "scale sm_scale scaling attention_scale logits_scale qk_scale",
    "causal": "is_causal",
    "sliding_window": "window window_size local_window_size sliding_window_size local_window",
    "logits_soft_cap": "softcap soft_cap logit_cap logits_cap logit_soft_cap logit_softcapping attn_logits_soft_cap",
    "dropout_prob": "dropout dropout_p dropout_rate",
    "dropout_seed": "dropout_rng dropout_key seed",
    "return_lse": "return_residual return_residuals return_logsumexp return_softmax_lse",
    "backend": "implementation impl platform",
}

OTHER_NAMES = {other: name for name, others in BY_NAME.items() for other in others.split()} | {
    "mask_info": "'attention_mask' takes its mask, or 'q_segment_ids' and 'kv_segment_ids' its segments",
    "mesh": "call it inside jax.shard_map",
    "in_specs": "call it inside jax.shard_map, which takes in_specs",
    "out_specs": "call it inside jax.shard_map, which takes out_specs",
    "normalize_output": "the output is always normalized; return_lse=True returns the log-sum-exp too",
    "logits_dtype": "it is not needed: logits are float32, or float64 for float64",
    "segment_ids": "'q_segment_ids' and 'kv_segment_ids' take them, of queries and of keys",
    **dict.fromkeys(
        ("block_tables", "block_table", "page_table", "page_indices"),
        "call ragged_paged_attention for a cache of pages; 'kv_lengths' is for one that has a row for each sequence",
    ),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "leave it out: there are no longest lengths to give"),
    "return_attn_probs": "there are no probabilities to return; 'return_lse' returns the log-sum-exp",
    "broadcast_dropout": "leave it out: each probability is dropped by itself",
    "force_fp32_for_softmax": "it is not needed: logits and sums are float32, or float64 for float64",
    **dict.fromkeys(("interpret", "debug"), "leave it out: the plugin of a kernel launches it"),
    **dict.fromkeys(("block_size", "block_q", "block_k", "block_sizes", "config"), "'cfg' takes a kernel's Config"),
    "enable_gqa": "it is not needed: heads of queries share heads of keys wherever there are fewer of these",
    "precision": "it is not needed: logits and sums are float32, or float64 for float64",
    "deterministic": "it is not needed: without dropout_prob nothing is dropped",
    "alibi_slopes": "'bias' takes slopes times positions",
    "query_seq_lengths": "'q_segment_ids' of 0 are padding, or call ejkernel_ops.jax_nn.dot_product_attention",
    "q_indices": "'q_start' takes the position of the first query; those of the others follow one by one",
    "q_positions": "'q_start' takes the position of the first query; those of the others follow one by one",
    **dict.fromkeys(("k_start", "k_end"), "'sliding_window' and 'kv_lengths' say which keys a query sees"),
}
