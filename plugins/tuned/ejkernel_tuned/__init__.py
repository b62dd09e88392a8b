"""Records that were measured on NVIDIA GPUs, a folder for each. The calls that they are of, and similar ones, need no
tuning there.
"""

import warnings

from ejkernel_cache import PackagedRecords
from ejkernel_core.extend import version_of

__all__ = ["records"]

records = PackagedRecords("ejkernel_tuned")

#: The distributions that had these records before, one for each card.
_FORMER = ("ejkernel-tuned-h100", "ejkernel-tuned-h200")


def _warn_of_former_distributions() -> None:
    """Their records still answer. They are not updated, so one day they would be older than these."""
    names = [name for name in _FORMER if version_of(name) != "not installed"]
    if names:
        text = f"ejkernel-tuned has the records of {' and '.join(names)}, which can go: pip uninstall {' '.join(names)}"
        warnings.warn(text, stacklevel=2)


_warn_of_former_distributions()
