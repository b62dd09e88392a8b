"""How a Pallas kernel is launched on a TPU, whichever operation it is of."""
