"""The compiler for TPUs, libtpu, where there is no TPU, and what it reports of a program."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from ejkernel_pallas_tpu.launch._generations import KINDS

#: The reports that it writes, by the ends of the names of their files.
REPORTS = ("vmem_report", "final_bundles", "final_hlo-static.*")
#: Four chips of each generation.
TOPOLOGIES: dict[str, dict[str, str]] = {
    "v4": {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"},
    "v5e": {"topology_name": "v5e:2x2"},
    "v5p": {"topology_name": "v5p:2x2x1"},
    "v6e": {"topology_name": "v6e:2x2"},
    "v7x": {"topology_name": "tpu7x:2x2x1"},
}


def versions() -> str:
    """The compiler, by its version and those around it."""
    packages = (f"{name} {version(name)}" for name in ("libtpu", "jax", "jaxlib"))
    return f"{', '.join(packages)}, Python {platform.python_version()}"


def in_main_memory(generation: str) -> dict[str, str]:
    """The compiler's options that leave operands in main memory: XLA has no vector memory of its own for them.

    Otherwise, some kernels would have their operands in vector memory already, and others would have to fetch them.
    """
    (chip,) = {kind for kind in KINDS.values() if kind.name == generation}
    return {"xla_tpu_scoped_vmem_limit_kib": str(chip.vmem // 1024)}


def pallas_kernels(text: str) -> list[tuple[str, str]]:
    """The name and the code of each Pallas kernel in a lowered program."""
    pattern = r'@tpu_custom_call\(.*?backend_config = "(.*?)".*?kernel_name = "([\w.-]+)"'
    return [(name, code) for code, name in re.findall(pattern, text)]


def base_name(kernel: str) -> str:
    """The name that ``pallas_call`` has for a kernel: the compiler adds a number.

    >>> base_name("flash_attention.1")
    'flash_attention'
    """
    return re.sub(r"\.\d+$", "", kernel)


@attrs.frozen(eq=False)
class Program:
    """A compiled function."""

    text: str
    folder: Path

    @property
    def kernels(self) -> list[str]:
        """The names of its Pallas kernels, in order."""
        return re.findall(r"%([\w.-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"", self.text)

    @property
    def operations(self) -> list[str]:
        """The names of all operations with a schedule, in order: XLA's own fusions too."""
        entry = self.text[self.text.index("ENTRY ") :]
        return [name for name in re.findall(r"^ +(?:ROOT )?%([\w.-]+) = ", entry, re.MULTILINE) if self._has(name)]

    def _has(self, operation: str) -> bool:
        return any(self.folder.glob(f"*-{operation}-[0-9]*-final_bundles.txt"))

    def vmem(self, kernel: str) -> int:
        """How many bytes of vector memory a kernel takes: blocks, scratch, and what registers do not hold."""
        (report,) = self.folder.glob("*vmem_report.html")
        text = report.read_text()
        # A script in a page has the data of all operations of the program.
        start = re.search(rf"\"{re.escape(kernel)}\": ", text)
        if start is None and self._has(kernel):
            return 0  # it moves main memory alone
        if start is None:
            raise LookupError(f"the compiler's report of vector memory does not have the kernel {kernel}")
        operation, _ = json.JSONDecoder().raw_decode(text, start.end())
        return int(operation["total_size"])


@attrs.frozen(eq=False)
class Compiler:
    """libtpu. A process starts it once, because it reads its environment when it is loaded."""

    folder: Path

    @classmethod
    def start(cls) -> Compiler:
        folder = Path(tempfile.mkdtemp(prefix="ejkernel-tpu-"))
        labels = "|".join(REPORTS)
        os.environ |= {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=({labels})",
            # Several processes may load it, none has a TPU, and its log is not read.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_LOG_DIR": "disabled",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        }
        jax.config.update("jax_platforms", "cpu")
        return cls(folder)

    def mesh(
        self,
        generation: str,
        shape: tuple[int, ...] = (1,),
        axes: tuple[str, ...] = ("x",),
        kind: AxisType = AxisType.Auto,
    ) -> Mesh:
        """A mesh of absent devices of a generation."""
        chips = topologies.get_topology_desc(platform="tpu", **TOPOLOGIES[generation]).devices
        return Mesh(np.array(chips[: math.prod(shape)]).reshape(shape), axes, axis_types=(kind,) * len(axes))

    def device_kind(self, generation: str) -> str:
        """JAX's name of the devices of a generation."""
        return str(self.mesh(generation).devices.flat[0].device_kind)

    def lower(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh) -> Any:
        """One call of a function, lowered for a mesh. Arguments without a sharding are replicated."""
        is_sharded = any(getattr(argument, "sharding", None) is not None for argument in jax.tree.leaves(arguments))
        options: Any = {} if is_sharded else {"in_shardings": NamedSharding(mesh, PartitionSpec())}
        with use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=("tpu",))

    def compile(self, lowered: Any, options: Mapping[str, str] | None = None) -> Program:
        """The program of a lowered call. The reports of the next one replace its own."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return Program(str(lowered.compile(compiler_options=dict(options or {})).as_text()), self.folder)

    def stop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
