"""``python .ci/pictures.py``: draw the pictures of the README and the pages from the tables of docs/measurements.

Each picture is drawn twice, for light and for dark pages, with a background of its own: a page may be dark where the
system of the reader is light.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"
FOLDER = ROOT / "docs" / "pictures"
#: In inches, of which a README shows 96 pixels each, and the size of its smallest text in points.
WIDTH, TEXT = 8.6, 9.5
TIMES = "\N{MULTIPLICATION SIGN}"


class Theme(NamedTuple):
    """The colours of a page, and of what is drawn on it."""

    suffix: str
    background: str
    text: str
    faint: str
    ours: str
    peer: str


THEMES = (
    Theme("", "#ffffff", "#1f2328", "#d1d9e0", "#0b5cad", "#7a828b"),
    Theme("-dark", "#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#9aa4af"),
)


# -- the figures -------------------------------------------------------------------------------------------------------


def table(page: str, heading: str, first_column: str) -> list[list[str]]:
    """The rows of the first table after a heading of a page whose first column has this name."""
    text = (MEASUREMENTS / f"{page}.md").read_text()
    after = text[text.index(f"\n{heading}\n") :]
    rows = re.search(rf"^\| {first_column} \|.*\n\| --- .*\n((?:\|.*\n)+)", after, re.MULTILINE)
    assert rows is not None, f"no table of {page} follows {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


class Case(NamedTuple):
    """A call of attention on a card: TFLOP/s of ours and of cuDNN, forward and in both passes."""

    name: str
    ours: tuple[float, float]
    cudnn: tuple[float, float]


def work(name: str) -> float:
    """The operations of a forward pass in billions; the diagonal of a causal one counts as half."""
    batch, length, heads, head_dim = map(int, re.sub(r" \(.*?\)", "", name).split(", ")[:4])
    return 4e-9 * batch * length**2 * heads * head_dim * (1.0 if name.endswith("full") else 0.5)


def on_h200() -> Iterator[Case]:
    """The seven common sizes: two rows each, with our milliseconds and cuDNN's relative to them."""
    rows = table("h200-2026-11-22", "## Attention in Gluon", "case")
    for forward, both in zip(rows[::2], rows[1::2], strict=True):
        name = forward[0].removesuffix(", causal")
        amounts = work(name), 3.5 * work(name)
        ours = [amount / float(row[2]) for amount, row in zip(amounts, (forward, both), strict=True)]
        cudnn = [rate / float(row[6]) for rate, row in zip(ours, (forward, both), strict=True)]
        yield Case(name, (ours[0], ours[1]), (cudnn[0], cudnn[1]))


def on_h100() -> Iterator[Case]:
    """The same sizes: a row each, with our milliseconds and cuDNN's relative to them."""
    for row in table("h100-2026-11-25", "## Attention in Gluon", "case")[:7]:
        name, amount = row[0], work(row[0])
        ours = amount / float(row[1]), 3.5 * amount / float(row[4])
        yield Case(name, ours, (ours[0] / float(row[3]), ours[1] / float(row[6])))


def memory() -> list[tuple[int, float, float]]:
    """Tokens, and MiB of ours and of ``jax.nn``."""
    return _by_tokens(table("cpu-2026-11-21", "## Attention on the CPU", "tokens"))


def memory_of_loss() -> list[tuple[int, float, float]]:
    """Tokens, and MiB of ours and with all logits."""
    return _by_tokens(table("cpu-2026-11-21", "## The loss of a language model", "tokens"))


def _by_tokens(rows: Sequence[Sequence[str]]) -> list[tuple[int, float, float]]:
    return [(int(row[0]), float(row[1]), float(row[2])) for row in rows]


def step() -> list[tuple[str, float, float]]:
    """The parts of a training step, with our milliseconds and tokamax's: forward, again and backward."""
    rows = table("h100-h200-2026-11-27", "## A training step with experts", "part")
    return [(name, *(sum(float(cell or 0) for cell in cells) for cells in (row[:3], row[3:]))) for name, *row in rows]


# -- the pictures ------------------------------------------------------------------------------------------------------


def attention(theme: Theme) -> Figure:
    """Rates beside cuDNN: a row of panels for each card, a column for each pass."""
    cards = {"H200": list(on_h200()), "H100": list(on_h100())}
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    panels = figure.subplots(len(cards), 2, sharex=True, sharey=True)
    for row, (card, cases) in enumerate(cards.items()):
        for column, name in enumerate(("forward", "forward and backward")):
            axes = panels[row][column]
            _rates(axes, [(case.ours[column], case.cudnn[column]) for case in cases], theme)
            axes.set_title(f"NVIDIA {card}, {name}", loc="left", fontsize=TEXT + 1, color=theme.text, weight="bold")
            axes.set_yticks(range(len(cases)), [_label(case.name) for case in cases])
            axes.set_ylim(len(cases) - 0.4, -1.1)
            if row == len(cards) - 1:
                axes.set_xlabel("TFLOP/s in bfloat16; more is better")
    return figure


def _label(name: str) -> str:
    """Such as "4 x 4096, 16 x 128 causal": batch and length, heads and head dim."""
    batch, length, heads, head_dim, *words = name.split(", ")
    return f"{batch} {TIMES} {length}, {heads} {TIMES} {head_dim} {'full' if words else 'causal'}"


def _rates(axes: Axes, pairs: Sequence[tuple[float, float]], theme: Theme) -> None:
    for place, (ours, cudnn) in enumerate(pairs):
        axes.plot([cudnn, ours], [place, place], color=theme.faint, linewidth=5, solid_capstyle="round", zorder=1)
        axes.scatter([cudnn], [place], s=34, facecolor=theme.background, edgecolor=theme.peer, linewidth=1.6, zorder=2)
        axes.scatter([ours], [place], s=40, color=theme.ours, zorder=3)
        axes.annotate(
            f"{ours / cudnn:.2f} {TIMES}", (max(ours, cudnn), place), (9, 0), textcoords="offset points", va="center",
            fontsize=TEXT, color=theme.text,
        )  # fmt: skip
    ours, cudnn = pairs[0]
    sides = (("ejkernel", ours, theme.ours, "left", 1), ("cuDNN", cudnn, theme.peer, "right", -1))
    for name, rate, colour, side, shift in sides:
        axes.annotate(
            name, (rate, 0), (shift, 9), textcoords="offset points", ha=side, fontsize=TEXT, color=colour, weight="bold"
        )
    axes.set_xlim(340, 800)


def memory_by_length(theme: Theme) -> Figure:
    """Attention, beside ``jax.nn``."""
    title = "Memory of attention on a CPU, forward and backward, beside inputs and outputs"
    ticks = {16: "16 MiB", 128: "128 MiB", 1024: "1 GiB", 8192: "8 GiB", 65536: "64 GiB"}
    return _memory_lines(memory(), "jax.nn.dot_product_attention", title, ticks, (12, 2**16.6), theme)


def memory_of_losses(theme: Theme) -> Figure:
    """A loss, beside that with all logits."""
    title = "Memory of a loss on a CPU, forward and backward, beside inputs and outputs"
    ticks = {512: "512 MiB", 2048: "2 GiB", 8192: "8 GiB", 32768: "32 GiB"}
    return _memory_lines(memory_of_loss(), "all logits", title, ticks, (512, 2**15.9), theme)


def _memory_lines(
    rows: Sequence[tuple[int, float, float]],
    peer: str,
    title: str,
    ticks: Mapping[int, str],
    limits: tuple[float, float],
    theme: Theme,
) -> Figure:
    """Two lines on logarithmic axes, each with its name beside it."""
    tokens = [row[0] for row in rows]
    figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
    axes = figure.subplots()
    for column, name, colour in ((2, peer, theme.peer), (1, "ejkernel", theme.ours)):
        amounts = [row[column] for row in rows]
        axes.plot(tokens, amounts, color=colour, linewidth=2.2, marker="o", markersize=5)
        for place in (0, len(tokens) - 1):
            axes.annotate(
                _size(amounts[place]), (tokens[place], amounts[place]), (0, 8), textcoords="offset points",
                ha="center", fontsize=TEXT, color=theme.text,
            )  # fmt: skip
        axes.annotate(
            name, (tokens[2], amounts[2]), (-8, 8) if column == 2 else (8, -16), textcoords="offset points",
            ha="right" if column == 2 else "left", fontsize=TEXT + 1, color=colour, weight="bold",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.minorticks_off()
    axes.set_ylim(*limits)
    axes.set_xlim(tokens[0] / 1.25, tokens[-1] * 1.25)
    axes.set_xlabel("tokens")
    axes.set_title(title, loc="left", fontsize=TEXT + 1, color=theme.text, weight="bold")
    axes.grid(axis="y", color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def training_step(theme: Theme) -> Figure:
    """Two bars for each part of a step, the longest parts first."""
    parts = sorted(step(), key=lambda part: -max(part[1:]))
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    for column, name, colour, shift in ((1, "ejkernel", theme.ours, -0.2), (2, "tokamax", theme.peer, 0.2)):
        amounts = [part[column] for part in parts]
        places = [place + shift for place in range(len(parts))]
        axes.barh(places, amounts, height=0.36, color=colour)
        for place, amount in zip(places, amounts, strict=True):
            words = f"{amount:.1f}  {name}" if place == places[0] else f"{amount:.1f}"
            axes.annotate(
                words, (amount, place), (4, 0), textcoords="offset points", va="center", fontsize=TEXT,
                color=colour if place == places[0] else theme.text, weight="bold" if place == places[0] else "normal",
            )  # fmt: skip
    axes.set_yticks(range(len(parts)), [part[0] for part in parts])
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(max(part[1:]) for part in parts))
    axes.set_xlabel("milliseconds; less is better")
    title = "A training step of 7 layers with experts on an NVIDIA H100, by the profile"
    axes.set_title(title, loc="left", fontsize=TEXT + 1, color=theme.text, weight="bold")
    return figure


def _size(mib: float) -> str:
    """With two digits."""
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.{0 if mib >= 10 * 1024 else 1}f} GiB"


def settings(theme: Theme) -> dict[str, Any]:
    """The style, of a page that may be read at half its width."""
    return {
        "svg.fonttype": "none",  # text stays text, which can be searched and read out
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
        "svg.hashsalt": "ejkernel",
        "font.size": TEXT,
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.text,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "ytick.major.size": 0,
    }


PICTURES = {
    "attention": attention,
    "memory": memory_by_length,
    "loss-memory": memory_of_losses,
    "training-step": training_step,
}


def draw(folder: Path) -> Iterator[Path]:
    """Draw all pictures, and return their files."""
    for name, picture in PICTURES.items():
        for theme in THEMES:
            with rc_context(settings(theme)):
                file = folder / f"{name}{theme.suffix}.svg"
                picture(theme).savefig(file, metadata={"Date": None})
            yield file


if __name__ == "__main__":
    for path in draw(FOLDER):
        print(path.relative_to(ROOT))
