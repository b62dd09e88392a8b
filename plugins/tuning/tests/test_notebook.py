"""A real notebook kernel: plans, explanations and results are tables, and progress is one line."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CELLS = (
    """
import jax.numpy as jnp
import ejkernel_core
from ejkernel_tuning import autotune
x = jnp.arange(7680.0).reshape(60, 128)
ejkernel_core.plan("rms_norm", x)
""",
    'ejkernel_core.explain("rms_norm", x)',
    """
result = autotune("rms_norm", x, direction="both", budget_s=30)
result
""",
    """
with ejkernel_core.policy_override(autotune=True, budget_s=30):
    y = ejkernel_core.call("rms_norm", jnp.ones((500, 128)))
""",
)


class Table(HTMLParser):
    """The captions and the cells of all tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.captions: list[str] = []
        self.cells: list[str] = []
        self._texts: list[str] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self._texts = {"caption": self.captions, "td": self.cells, "th": self.cells}.get(tag)
        if self._texts is not None:
            self._texts.append("")

    def handle_data(self, data: str) -> None:
        if self._texts:
            self._texts[-1] += data


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The outputs of each cell, run by a kernel of this interpreter."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("jupyter")
    kernel = folder / "kernels" / "here"
    kernel.mkdir(parents=True)
    words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "here", "language": "python"}))
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("EJKERNEL_CACHE_DIR", str(folder / "cache"))
        client = nbclient.NotebookClient(
            nbformat.v4.new_notebook(cells=cells),
            timeout=120,
            kernel_name="here",
            resources={"metadata": {"path": str(folder)}},
            coalesce_streams=True,  # carriage returns count, as in a browser
        )
        return [cell.outputs for cell in client.execute().cells]


def table(outputs: list[Any]) -> Table:
    (html,) = (output.data["text/html"] for output in outputs if output.output_type == "execute_result")
    return Table(html)


def lines(outputs: list[Any]) -> list[str]:
    """The lines that stay, of those that were printed."""
    assert {output.output_type for output in outputs} <= {"stream", "execute_result"}
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]


@pytest.mark.long
def test_plans_and_explanations_are_tables(outputs: list[list[Any]]) -> None:
    plan, explanation = table(outputs[0]), table(outputs[1])
    assert plan.captions == ["rms_norm.xla"]
    assert plan.cells[plan.cells.index("chosen by") + 1] == "heuristic"
    assert explanation.captions == ["rms_norm.xla", "rms_norm_bwd.xla"]
    assert Path(__file__).name not in str(outputs[:2])


@pytest.mark.long
def test_a_result_is_a_table_and_the_progress_of_each_pass_is_one_line(outputs: list[list[Any]]) -> None:
    result = table(outputs[2])
    assert [caption.partition("(")[0] for caption in result.captions] == ["rms_norm", "rms_norm_bwd"]
    assert result.cells[:8] == ["", "backend", "configuration", "ms", "spread", "out because", "*", result.cells[7]]
    first, second = lines(outputs[2])
    assert first.startswith("tuning rms_norm: 2 of 2 measured")
    assert second.startswith("tuning rms_norm_bwd: 2 of 2 measured")


@pytest.mark.long
def test_the_progress_of_a_call_that_is_measured_is_one_line(outputs: list[list[Any]]) -> None:
    (line,) = lines(outputs[3])
    assert line.startswith("tuning rms_norm: 2 of 2 measured")
    assert "\x1b" not in line
