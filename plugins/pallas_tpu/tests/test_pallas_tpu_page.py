"""docs/pallas-tpu.md: its examples run, and its tables have the numbers of the code."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from ejkernel_pallas_tpu.flash_attention import _tuning
from ejkernel_pallas_tpu.launch._generations import KINDS, MIB

PAGE = (Path(__file__).parents[3] / "docs/pallas-tpu.md").read_text()
NAMES = {
    "forward": "forward",
    "fused backward": "fused",
    "backward, queries": "queries",
    "backward, keys and values": "keys",
    "gradient of a bias": "bias",
}


def test_the_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})


def test_the_tables_have_the_blocks_and_the_memory_of_each_generation():
    generations = {kind.name: attrs.astuple(kind) for kind in KINDS.values()}
    for name, which in NAMES.items():
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)
        cells = [tuple(map(int, cell.split(", "))) for cell in row.split(" | ")]
        assert cells == [_tuning.FIRST[which][generation] for generation in generations]
    (row,) = re.findall(r"^\| vector memory that may be used \| (.*) \|$", PAGE, re.MULTILINE)
    cells = [tuple(map(int, re.findall(r"\d+", cell))) for cell in row.split(" | ")]
    assert cells == [(budget // MIB, vmem // MIB) for _, vmem, budget, _ in generations.values()]
