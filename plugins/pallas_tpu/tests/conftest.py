"""A draft: `make` does not install it yet, and its tests run where somebody has."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ejkernel_pallas_tpu") else ["test_*.py"]
