"""How a Triton kernel is launched by JAX, whichever operation it is of."""
