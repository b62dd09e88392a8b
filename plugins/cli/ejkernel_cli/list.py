"""List the operations, their backends, and the distributions that bring them.

Everything is read from metadata, so this works where JAX cannot be imported, too.
"""

from __future__ import annotations

import click

from ._metadata import KERNELS, OPERATIONS, POLICIES, distribution, entry_points, provider
from ._output import json_option, print_json, print_table


@click.command("list")
@json_option
def command(as_json: bool) -> None:
    """List the operations, their backends, and the distributions that bring them."""
    operations = {point.name: provider(point) for point in entry_points(OPERATIONS)}
    kernels: dict[str, dict[str, str]] = {name: {} for name in operations}
    for point in entry_points(KERNELS):
        operation, _, backend = point.name.rpartition(".")
        kernels.setdefault(operation, {})[backend] = distribution(point)
    policies = {point.name: provider(point) for point in entry_points(POLICIES)}
    if as_json:
        print_json({"operations": operations, "kernels": kernels, "policies": policies})
        return
    print_table(
        ("operation", "backends", "from"),
        [(name, ", ".join(sorted(kernels[name])), operations.get(name, "no distribution")) for name in sorted(kernels)],
    )
    print_table(("policy", "from"), sorted(policies.items()))
