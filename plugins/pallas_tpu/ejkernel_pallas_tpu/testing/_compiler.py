"""The compiler for TPUs, libtpu, where there is no TPU; and what it tells of a program besides the program."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from ejkernel_pallas_tpu.launch._generations import KINDS

#: What it is asked to write down, by the ends of its files' names.
DUMPED = ("vmem_report", "assembly-pre-overlay", "hlo-details", "final_bundles", "final_hlo-static.*")
#: Four chips of each generation.
TOPOLOGIES: dict[str, dict[str, str]] = {
    "v4": {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"},
    "v5e": {"topology_name": "v5e:2x2"},
    "v5p": {"topology_name": "v5p:2x2x1"},
    "v6e": {"topology_name": "v6e:2x2"},
    "v7x": {"topology_name": "tpu7x:2x2x1"},
}


def in_main_memory(generation: str) -> dict[str, str]:
    """What has the compiler leave operands in main memory: no vector memory is its own to bring them into.

    Without it, one kernel finds its operands where another has to fetch them from, as there is room.
    """
    (told,) = {kind for kind in KINDS.values() if kind.name == generation}
    return {"xla_tpu_scoped_vmem_limit_kib": str(told.vmem // 1024)}


@attrs.frozen(eq=False)
class Program:
    """A compiled function."""

    text: str
    folder: Path

    @property
    def kernels(self) -> list[str]:
        """The names of its Pallas kernels, in order."""
        return re.findall(r"%([\w.-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"", self.text)

    def vmem(self, kernel: str) -> int:
        """How many bytes of vector memory a kernel takes: its blocks, its scratch and what registers do not hold."""
        (report,) = self.folder.glob("*vmem_report.html")
        text = report.read_text()
        # A script in a page; its data are those of all operations of the program.
        start = re.search(rf"\"{re.escape(kernel)}\": ", text)
        if start is None:
            raise LookupError(f"the compiler's report says nothing of {kernel}")
        found, _ = json.JSONDecoder().raw_decode(text, start.end())
        return int(found["total_size"])


@attrs.frozen(eq=False)
class Compiler:
    """libtpu, to be asked once in a process: it looks at its environment when it is loaded."""

    folder: Path

    @classmethod
    def start(cls) -> Compiler:
        folder = Path(tempfile.mkdtemp(prefix="ejkernel-tpu-"))
        labels = "|".join(DUMPED)
        os.environ |= {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=({labels})",
            # Several processes may load it, none has a TPU, and nobody reads its log.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_LOG_DIR": "disabled",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        }
        jax.config.update("jax_platforms", "cpu")
        return cls(folder)

    def mesh(self, generation: str, shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("x",)) -> Mesh:
        """Devices of a generation that are not there."""
        chips = topologies.get_topology_desc(platform="tpu", **TOPOLOGIES[generation]).devices
        return Mesh(np.array(chips[: math.prod(shape)]).reshape(shape), axes)

    def compile(
        self,
        function: Callable[..., Any],
        *given: Any,
        mesh: Mesh,
        sharding: NamedSharding | None = None,
        options: Mapping[str, str] | None = None,
    ) -> Program:
        """The program of one call. The next one's files replace its own."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        sharding = sharding or NamedSharding(mesh, PartitionSpec())
        with use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(function, in_shardings=sharding).trace(*given).lower(lowering_platforms=("tpu",))
        return Program(str(lowered.compile(compiler_options=dict(options or {})).as_text()), self.folder)

    def stop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
