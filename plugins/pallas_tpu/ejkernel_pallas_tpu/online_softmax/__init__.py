"""The parts of attention that its kernels share: products of tiles, heads of a block, and the softmax of logits that
arrive tile by tile. Importing this package does not import Pallas; ``heads`` does.
"""
