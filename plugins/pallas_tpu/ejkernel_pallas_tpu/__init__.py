"""Flash attention for TPUs, in Pallas. The modules ``flash_attention`` and ``flash_attention_bwd`` are the kernels."""
