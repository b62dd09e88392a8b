"""Find out what is broken, and what would make calls faster, with the line that installs it.

It goes on where JAX cannot be imported or has no device, and says so.
"""

from __future__ import annotations

import attrs
import click

from ._findings import BROKEN, OK, Finding, examine
from ._metadata import FAMILY
from ._output import json_option, print_json, print_line, print_table


@click.command("doctor")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Find out what is broken, and what would make calls faster.

    Shows the devices, the versions of what matters, the distributions of the project, its environment variables, the
    cache, and every plugin that cannot be used. The exit code is 1 if something is broken.
    """
    findings = examine()
    broken = [finding for group in findings.values() for finding in group if finding.status == BROKEN]
    if as_json:
        groups = {heading: [attrs.asdict(finding) for finding in group] for heading, group in findings.items()}
        print_json({"broken": len(broken), **groups})
    else:
        _print(findings)
        print_line(_outcome(len(broken)))
    ctx.exit(1 if broken else 0)


def _print(findings: dict[str, list[Finding]]) -> None:
    for heading, group in findings.items():
        if group:
            print_table((heading, "", ""), [_row(finding) for finding in _joined(group)])
            print_line()
    # As lines of their own, which can be copied: a table would break them.
    advice = [finding for group in findings.values() for finding in group if finding.advice]
    if advice:
        print_line("What to do:")
        for finding in advice:
            print_line(f"  {finding.subject}: {finding.advice}")
        print_line()


def _row(finding: Finding) -> tuple[str, str, str]:
    return finding.subject, finding.status.upper() if finding.status == BROKEN else finding.status, finding.text


def _joined(group: list[Finding]) -> list[Finding]:
    """The findings, with one in the place of all good distributions, which have one version."""
    good = [finding for finding in group if finding.status == OK and finding.subject.startswith(FAMILY)]
    if not good:
        return group
    names = ", ".join(finding.subject.removeprefix(FAMILY) for finding in good)
    return [Finding(f"ejkernel {good[0].text}", OK, names), *(finding for finding in group if finding not in good)]


def _outcome(count: int) -> str:
    if not count:
        return "nothing is broken"
    return f"{count} {'thing is' if count == 1 else 'things are'} broken"
