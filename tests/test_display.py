"""How values are displayed: in one line at a prompt, and as a table in a notebook, with all text escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

from ejkernel_classes import Invocation as KernelInvocation
from ejkernel_classes import Kernel
from ejkernel_core import ConfigCache, Invocation, Operation, Provenance, Record, Registry, hookimpl
from ejkernel_tuning import Entry, Tuned, TuningResult

X = jax.ShapeDtypeStruct((3,), "float32")


def scale(x, *, mode="plain"): ...


@attrs.frozen
class Config:
    """A configuration whose ``repr`` has line breaks and HTML markup."""

    block: int = 64

    def __repr__(self) -> str:
        return f"Config(\n<b>{self.block}</b> & 'x')"


@pytest.fixture
def registry() -> Registry:
    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    hooks = {"heuristic_cfg": heuristic_cfg, "run_backend": run_backend}
    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],), backward="scale_bwd"))
    registry.register(
        Operation(name="scale_bwd", signature=lambda *, x, mode, out, d_out, wrt: None, arrays=("x", "out"))
    )
    registry.register(SimpleNamespace(Config=Config, **hooks), "scale.one")
    registry.register(SimpleNamespace(Config=Config, PLATFORMS={"abacus": 5}, **hooks), "scale.bead")
    return registry


class Cells(HTMLParser):
    """The texts of a table's cells, and all tags of the HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        if tag in ("td", "th", "caption", "pre"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def test_a_plan_is_one_line(registry: Registry) -> None:
    plan = registry.plan("scale", X, mode="<i>")
    assert repr(plan) == "Plan(scale.one with Config( <b>64</b> & 'x'), by heuristic)"
    assert str(plan).startswith("scale.one with Config( <b>64</b> & 'x'), by heuristic\n  for scale(")


def test_an_invocation_is_one_line(registry: Registry) -> None:
    inv = registry.invocation("scale", X, mode="<i>\n" * 100)
    assert repr(inv).startswith("Invocation(scale(x=float32[3], mode='<i>\\n")
    assert len(repr(inv)) < 200
    assert repr(registry.invocation("scale", X)) == f"Invocation({registry.invocation('scale', X)})"
    assert repr(registry.invocation("scale", X).with_arrays({"x": jnp.ones(3)})).startswith(
        "Invocation(scale(x=float32[3], mode='plain') on cpu ("
    )


def test_an_explanation_is_one_line(registry: Registry) -> None:
    registry.register(simple_kernel(), "scale_bwd.reference")
    explanation = registry.explain("scale", X)
    plan = "scale.one with Config( <b>64</b> & 'x'), by heuristic"
    assert repr(explanation) == f"Explanation({plan}; scale_bwd.reference, by heuristic)"
    assert str(explanation).splitlines()[0] == plan
    refusal = registry.explain("scale", X, backend="bead")
    assert repr(refusal).startswith("Explanation(no kernel can do scale(x=float32[3], mode='plain') on cpu (")
    assert "\n" not in repr(refusal)


def simple_kernel() -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"]

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def test_a_notebook_shows_all_text_escaped(registry: Registry) -> None:
    plan = registry.plan("scale", X, mode="<script>alert(1)</script>")
    html = Cells(plan._repr_html_())
    assert html.tags == {"table", "caption", "tr", "td"}
    assert html.cells[0] == "scale.one"
    assert "Config( <b>64</b> & 'x')" in html.cells
    assert any("mode='<script>alert(1)</script>'" in cell for cell in html.cells)
    start = html.cells.index("scale.bead")
    assert html.cells[start + 1 : start + 4] == [
        "registered at run time",
        "refused",
        "it runs on abacus; this is cpu",
    ]


def test_a_notebook_shows_the_arguments_of_an_invocation(registry: Registry) -> None:
    html = Cells(registry.invocation("scale", X, mode="<i>")._repr_html_())
    assert html.cells[0].startswith("scale on cpu (")
    assert html.cells[1:] == ["x", "float32[3]", "mode", "'<i>'"]
    assert html.tags == {"table", "caption", "tr", "td"}


def test_a_notebook_shows_plan_backward_and_note_of_an_explanation(registry: Registry) -> None:
    registry.register(simple_kernel(), "scale_bwd.reference")
    explanation = registry.explain("scale", X)
    html = Cells(explanation._repr_html_())
    assert html.cells[0] == "scale.one"
    assert "scale_bwd.reference" in html.cells
    assert explanation.note in html.cells
    refusal = Cells(registry.explain("scale", X, backend="bead", mode="<i>")._repr_html_())
    assert refusal.tags == {"pre"}
    assert refusal.cells[0] == str(registry.explain("scale", X, backend="bead", mode="<i>").error)


def test_the_repr_of_a_container_has_its_size(registry: Registry) -> None:
    assert repr(registry) == "Registry(plugins='', 2 operations, 2 kernels, 0 policies)"
    assert repr(registry.kernel("scale", "one")) == "LoadedKernel(scale.one, registered at run time)"
    cache = ConfigCache(maxsize=2)
    assert repr(cache) == "ConfigCache(0 keys, at most 2)"
    for key in "abc":
        cache.put(key, Config())
    assert repr(cache) == "ConfigCache(2 keys, at most 2)"
    cache = ConfigCache()
    cache.put("a", Config())
    assert repr(cache) == "ConfigCache(1 key)"


def test_the_repr_of_a_tuning_result_has_the_fastest_kernel(registry: Registry) -> None:
    provenance = Provenance(when="", device="d", milliseconds=0.5, backends=("one",))
    inv = registry.invocation("scale", X)
    success = Tuned((inv.key,), str(inv), (Entry("one", Config(), 0.5),), (Record(Config(), "one", provenance),))
    failure = Tuned((inv.key,), str(inv), (Entry("one", Config(), reason="raises"),), ())
    assert repr(success) == "Tuned(scale: one with Config( <b>64</b> & 'x') in 0.5 ms)"
    by_hand = attrs.evolve(success, entries=(Entry("one", Config()),))
    assert repr(TuningResult((by_hand,))) == "TuningResult(1 result: scale by one)"
    assert repr(failure) == "Tuned(scale: no result)"
    assert (
        repr(TuningResult((success, failure)))
        == "TuningResult(2 results: scale by one in 0.5 ms, scale without a result)"
    )
    assert repr(TuningResult((success,))) == "TuningResult(1 result: scale by one in 0.5 ms)"
    assert repr(TuningResult()) == "TuningResult(0 results)"
    assert len(repr(TuningResult((success,) * 100))) < 200


def test_a_notebook_shows_a_tuning_result_as_a_table(registry: Registry) -> None:
    inv = registry.invocation("scale", X, mode="<i>")
    entries = (Entry("one", Config(), 0.5, 0.01), Entry("one", Config(9), reason="wrong: 1 < 2", is_usual=True))
    provenance = Provenance(when="", device="d", milliseconds=0.5, backends=("one",))
    tuned = Tuned((inv.key,), str(inv), entries, (Record(Config(), "one", provenance),), 2.0, ("checked < by hand",))
    html = Cells(TuningResult((tuned,))._repr_html_())
    assert html.tags == {"table", "caption", "tr", "th", "td", "pre"}
    title, *cells, notes = html.cells
    assert title == f"{inv}, in 2.0 s"
    assert cells == [
        *("", "backend", "configuration", "ms", "spread", "out because"),
        *("*", "one", "Config( <b>64</b> & 'x')", "0.5", "0.01", ""),
        *("", "one", "Config( <b>9</b> & 'x') (heuristic)", "", "", "wrong: 1 < 2"),
    ]
    assert notes == "checked < by hand"
    assert TuningResult((tuned, tuned))._repr_html_() == 2 * tuned._repr_html_()
    assert Cells(TuningResult()._repr_html_()).cells == ["nothing was tuned"]


def test_the_repr_of_a_kernel_objects_invocation_has_no_values() -> None:
    class Twice(Kernel[None, Any]):
        def run(self, x, *, cfg):
            return x * 2

        def heuristic_cfg(self, inv):
            return None

    inv = Twice().invocation(jnp.arange(1000.0))
    assert isinstance(inv, KernelInvocation)
    assert isinstance(inv.core, Invocation)
    assert repr(inv) == repr(inv.core)
    assert "float32[1000]" in repr(inv)
    assert "\n" not in repr(inv)
    assert inv._repr_html_() == inv.core._repr_html_()
