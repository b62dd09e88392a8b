"""Which attention calls cuDNN computes exactly as the operation defines them, and how to call it.

``jax.nn.dot_product_attention`` uses the same library, but it rounds the lse to the output's dtype and has no backward
from saved results. Both exist one level below, in a private module of JAX: every use of it is in ``_library``, which
refuses an interface that it does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.tokens import band

Forward = Callable[..., Any]
Backward = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]

NO_FEATURE = {
    "bias": "a bias",
    "attention_mask": "an attention mask",
    "q_segment_ids": "segment ids",
    "cum_seqlens_q": "packed sequences",
    "kv_positions": "positions of keys",
    "kv_lengths": "lengths of a cache",
    "q_start": "a position of the queries",
    "softmax_aux": "sink logits",
    "logits_soft_cap": "a soft cap",
}


def refusal(arguments: Mapping[str, Any]) -> str | None:
    """Why cuDNN does not compute exactly this call, or None if it does; a backward has ``wrt`` among its arguments."""
    for reason in (_unsupported(arguments), _unsupported_mask(arguments), _unsupported_backward(arguments)):
        if reason is not None:
            return reason
    library = _library()
    if isinstance(library, str):
        return library
    return _too_wide(arguments["query"].shape[-1], "wrt" in arguments)


def forward(inv: Invocation) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse in float32; only where ``refusal`` is None."""
    attend, _ = _functions()
    results = attend(inv["query"], inv["key"], inv["value"], has_lse=inv.needs("lse"), **_options(inv))
    return results if inv.needs("lse") else (results, None)


def backward(arguments: Mapping[str, Any]) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, from out and lse of the forward by any backend."""
    _, differentiate = _functions()
    inputs = (arguments[name] for name in ("query", "key", "value", "lse", "out", "d_out"))
    gradients = differentiate(*inputs, **_options(arguments))
    by_name = dict(zip(("query", "key", "value"), gradients, strict=True))
    return tuple(by_name[name] for name in arguments["wrt"])


def _unsupported(arguments: Mapping[str, Any]) -> str | None:
    query, value = arguments["query"], arguments["value"]
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN attention takes float16 and bfloat16, not {query.dtype}"
    for name, text in NO_FEATURE.items():
        if arguments[name] is not None:
            return f"cuDNN attention is not used with {text} (argument {name})"
    if arguments["dropout_prob"]:
        return "cuDNN draws another dropout mask than the other backends do"
    if 0 in query.shape or 0 in value.shape:
        return "cuDNN attention takes no empty arrays"
    if query.shape[1] == arguments["key"].shape[1] == 1:
        return "cuDNN attention takes no single query with a single key"
    if query.shape[-1] != value.shape[-1]:
        return f"cuDNN attention is used with one head dim, not with {query.shape[-1]} and {value.shape[-1]}"
    if query.shape[-1] % 8:
        return f"cuDNN attention takes head dims that are multiples of 8, not {query.shape[-1]}"
    if not arguments["softmax_scale"] > 0:
        return f"cuDNN attention takes a positive softmax_scale, not {arguments['softmax_scale']}"
    return None


def _unsupported_mask(arguments: Mapping[str, Any]) -> str | None:
    left, right = _limits(arguments)
    if (left, right) == (None, None):
        return None
    if arguments["query"].shape[1] != arguments["key"].shape[1]:
        # cuDNN's diagonal starts in the top left corner; the operation's ends in the bottom right one.
        return "cuDNN's causal mask and window are aligned differently when query and key lengths differ"
    if right != 0:
        return "cuDNN's window has no right side: it needs causal=True or sliding_window=(left, 0)"
    return None


def _unsupported_backward(arguments: Mapping[str, Any]) -> str | None:
    if "wrt" not in arguments:
        return None
    if arguments["d_lse"] is not None:
        return "cuDNN's backward takes no gradient of the log-sum-exp"
    if arguments["d_out"] is None:
        return "cuDNN's backward needs a gradient of the output"
    return None


def _too_wide(head_dim: int, is_backward: bool) -> str | None:
    major, _, _ = jax.local_devices(backend="gpu")[0].compute_capability.partition(".")
    if int(major) < 8:
        return "cuDNN attention needs a GPU of compute capability 8.0 or later"
    # On cards after Hopper cuDNN takes 256 forward, but backward not in every release.
    limit = 256 if int(major) == 9 or (int(major) > 9 and not is_backward) else 128
    return f"cuDNN attention takes head dims up to {limit} on this GPU, not {head_dim}" if head_dim > limit else None


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    left, right = _limits(arguments)
    return {
        "scale": float(arguments["softmax_scale"]),
        "causal": right == 0,
        # cuDNN includes the token itself.
        "window": None if left is None else left + 1,
    }


def _limits(arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    # A limit that no key is beyond has no effect.
    left, right = band(arguments["causal"], arguments["sliding_window"])
    q_length, k_length = arguments["query"].shape[1], arguments["key"].shape[1]
    left = None if left is not None and left >= k_length - 1 else left
    return left, None if right is not None and right >= q_length - 1 else right


def _functions() -> tuple[Forward, Backward]:
    library = _library()
    if isinstance(library, str):
        raise NotImplementedError(library)
    return library


@cache
def _library() -> tuple[Forward, Backward] | str:
    # All uses of JAX's private interface are here.
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn
    except ImportError:
        return "this version of JAX has no module jax._src.cudnn.fused_attention_stablehlo"
    if getattr(cudnn, "cuda_versions", None) is None or jax.default_backend() != "gpu":
        return "JAX finds no CUDA GPU with cuDNN here"
    rule = getattr(cudnn, "_dot_product_attention_bwd_rule", None)
    parameters = tuple(inspect.signature(rule).parameters) if rule is not None else ()
    entry = cudnn.dot_product_attention
    options = {"scale", "mask_type", "sliding_window_length", "return_residual"}
    if (
        rule is None
        or parameters not in (RULE_UNTIL_0_11, RULE_SINCE_0_12)
        or not options <= set(inspect.signature(entry).parameters)
    ):
        return f"the cuDNN kernels do not know the interface to cuDNN of JAX {jax.__version__}"

    def mask(causal: bool) -> Any:
        return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK

    def attend(
        query: Any, key: Any, value: Any, *, has_lse: bool, scale: float, causal: bool, window: int | None
    ) -> Any:  # fmt: skip
        options = {"mask_type": mask(causal), "sliding_window_length": window, "return_residual": has_lse}
        return entry(query, key, value, scale=scale, **options)

    def differentiate(
        query: Any, key: Any, value: Any, lse: Any, out: Any, d_out: Any,
        *, scale: float, causal: bool, window: int | None,
    ) -> Any:  # fmt: skip
        unused = jnp.zeros(0, query.dtype)
        is_newer = parameters == RULE_SINCE_0_12
        # Empty arrays for bias, two lengths, two offsets and two page tables; then the arguments of a score function.
        residuals = (query, key, value, *(unused,) * 7, *(((),) if is_newer else ()), lse, out)
        static = (scale, 42, 0.0, (False, False), mask(causal), cudnn.AttentionLayout.BTNH.value, window)
        version = cudnn.check_cudnn_version()
        return rule(*static, *((None,) if is_newer else ()), version, False, residuals, d_out)[:3]

    return attend, differentiate


_RULE_START = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_RULE_END = ("return_residual", "res", "grad_output")
RULE_UNTIL_0_11 = (*_RULE_START, "is_training", *_RULE_END)
RULE_SINCE_0_12 = (*_RULE_START, "score_mod", "cudnn_version", *_RULE_END)
