"""``python -m ejkernel_cli`` is the command ``ejkernel``."""

from ejkernel_cli import main

main()
