"""Fixtures that install small distributions: folders with metadata and modules, put on ``sys.path``. All tests have them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

MakeDistribution = Callable[..., Path]

KERNEL = """
    from ejkernel_core import Unsupported, hookimpl

    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2
"""

OPERATION = """
    import jax
    from ejkernel_core import Operation

    def double(x): ...

    operation = Operation(
        name="double", signature=double, outputs=lambda a: (jax.ShapeDtypeStruct(a["x"].shape, a["x"].dtype),)
    )
"""


def write_distribution(
    folder: Path, name: str, files: Mapping[str, str], version: str = "1.0", **groups: Mapping[str, str]
) -> None:
    """Write a distribution with these files and, by group, the entry points ``ejkernel.<group>``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sections = [
        f"[ejkernel.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))
    for file, source in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(textwrap.dedent(source))


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDistribution]:
    """``distribution(name, modules, kernels=..., operations=..., policies=...)`` installs one; returns its folder."""
    count = 0
    all_modules: set[str] = set()

    def make(name: str, modules: Mapping[str, str], version: str = "1.0", **groups: Mapping[str, str]) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"site{count}"
        write_distribution(
            folder, name, {f"{module}.py": source for module, source in modules.items()}, version, **groups
        )
        all_modules.update(modules)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    # The next test may have other modules of these names, or find that none is installed.
    for module in all_modules:
        sys.modules.pop(module, None)


@pytest.fixture
def double(distribution: MakeDistribution) -> None:
    """The operation ``double`` with the good kernel ``double.good``, from the distribution ``good-dist``."""
    distribution(
        "good-dist",
        {"good_operation": OPERATION, "good_kernel": KERNEL},
        operations={"double": "good_operation:operation"},
        kernels={"double.good": "good_kernel"},
    )
