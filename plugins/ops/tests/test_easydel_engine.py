"""EasyDeL's engine generates the tokens of its own kernels with the lines of the pages, on a CPU.

EasyDeL 0.3.0 needs JAX 0.9, so it is in no environment of this project: install it, with pillow and torch, beside
ejkernel-core, ejkernel-ops and ejkernel-xla.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages import blocks

pytestmark = pytest.mark.long

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations"
VOCABULARY, LENGTH, NEW_TOKENS = 256, 128, 24
#: Tokens of each prompt. Steps have 32, so that a prompt is cut.
PROMPTS = (5, 41, 17, 1)


def functions_of(page: str) -> dict[str, Any]:
    """The functions of a page, its imports from this project, and their constants."""
    names: dict[str, Any] = {}
    for block in blocks(OPERATIONS / page):
        if block.language == "python":
            body = [node for node in ast.parse(block.content).body if is_definition(node)]
            exec(compile(ast.Module(body, []), page, "exec"), names)
    return names


def is_definition(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OPTIONS"
    return is_constant or isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom))


def tokenizer(folder: Path) -> Any:
    """A word for each number."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<unk>": VOCABULARY - 2, "</s>": VOCABULARY - 1}
    words_alone = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    words_alone.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words_alone, **special).save_pretrained(folder)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def model(easydel: Any, mechanism: str) -> Any:
    """Two layers of a Llama in float32, whose weights are so far apart that tokens differ. Each of the tests' eight
    devices has one head of keys.
    """
    from flax import nnx

    lengths = {"freq_max_position_embeddings": LENGTH, "mask_max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "num_hidden_layers": 2}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": LENGTH}
    config = easydel.LlamaConfig(**sizes, **heads, rope_theta=10000.0)
    options = {"attn_dtype": jnp.float32, "kvdtype": jnp.float32, "sharding_axis_dims": (1, 1, 1, -1, 1)}
    config.add_basic_configurations(attn_mechanism=mechanism, **options, **lengths)
    with config.mesh:
        dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        made = easydel.LlamaForCausalLM(config, rngs=nnx.Rngs(0), **dtypes)
    leaves, tree = jax.tree.flatten(nnx.state(made, nnx.Param))
    rng = np.random.default_rng(0)
    noise = [0.25 * rng.normal(size=leaf.shape).astype(np.float32) * (leaf.ndim > 1) for leaf in leaves]
    nnx.update(made, jax.tree.unflatten(tree, [leaf + x for leaf, x in zip(leaves, noise, strict=True)]))
    return made


def tokens_of(easydel: Any, mechanism: str, folder: Path) -> list[list[int]]:
    rng = np.random.default_rng(1)
    prompts = [" ".join(f"w{i}" for i in rng.integers(0, VOCABULARY - 3, count)) for count in PROMPTS]
    sizes = {"max_model_len": LENGTH, "max_num_seqs": 4, "page_size": 16, "max_num_batched_tokens": 32}
    given = {"model": model(easydel, mechanism), "tokenizer": tokenizer(folder), "dtype": jnp.float32}
    engine = easydel.eSurge(**given, **sizes, min_input_pad=4, enable_prefix_caching=False, silent_mode=True)
    engine.initiate()
    try:
        greedy = easydel.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        results = engine.generate(prompts, greedy, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]
    finally:
        engine.terminate()
        engine._worker_manager.shutdown()  # two processes of each engine


def test_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    easydel = pytest.importorskip("easydel", reason="EasyDeL is not in the environment")
    from easydel.caching.ragged_page import cache as ragged
    from easydel.caching.unified_attention import cache as unified
    from easydel.infra.mixins import generation
    from easydel.operations import OperationRegistry

    for module in (ragged, unified):  # a CPU has no memory of its own that could be asked
        monkeypatch.setattr(module, "per_device_hbm_budget_bytes", lambda *args, **options: 8 << 20)
    own = tokens_of(easydel, "ragged_page_attention_v3", tmp_path)
    monkeypatch.setattr(OperationRegistry, "_registry", dict(OperationRegistry._registry))
    monkeypatch.setattr(unified.UnifiedAttentionCacheView, "concatenate_to_cache", None)
    functions_of("ragged_paged_attention.md")["register_in_easydel"]()
    functions_of("update_kv_pages.md")["write_in_easydel"]()
    calls = []
    registered = OperationRegistry.get("unified_attention")
    attend = registered.forward_native
    monkeypatch.setattr(registered, "forward_native", lambda *args, **o: calls.append(1) or attend(*args, **o))
    # Its engine takes this mechanism on GPUs alone, because its own kernel is for them.
    monkeypatch.setattr(generation, "_resolve_backend_for_esurge", lambda config: "gpu")
    ours = tokens_of(easydel, "unified_attention", tmp_path)
    assert calls
    assert [len(tokens) for tokens in own] == [NEW_TOKENS] * len(PROMPTS)
    assert ours == own
