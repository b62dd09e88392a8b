"""The core's fixture that installs small distributions."""

from tests.conftest import distribution

__all__ = ["distribution"]
