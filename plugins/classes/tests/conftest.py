"""What the core's tests have for plugins that are made on the spot."""

from tests.conftest import distribution

__all__ = ["distribution"]
