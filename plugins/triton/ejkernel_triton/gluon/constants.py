"""Numbers of device code."""

from triton.experimental.gluon import language as gl

#: e to the power of x is 2 to the power of x times this. The hardware has powers of 2.
LOG2E = gl.constexpr(1.4426950408889634)
