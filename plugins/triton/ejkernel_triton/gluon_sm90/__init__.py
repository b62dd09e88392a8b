"""Attention for Hopper (compute capability 9.0) in Gluon: copies, products and softmax in warps of their own."""
