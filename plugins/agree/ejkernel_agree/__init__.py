"""The processes of one program choose alike, or fail together. See ``docs/several-processes.md``."""

from ._answer import Disagreement
from .policy import renew

__all__ = ["Disagreement", "renew"]
