"""What Gluon kernels for Hopper share: the copy engine, barriers, and what they need of the card and the versions."""
