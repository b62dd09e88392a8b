"""Attention, said once: its operations (``forward``, ``backward``) and the parts of the definition that kernels share.

``tokens`` says who sees whom, ``dropout`` which weights are dropped, ``cost`` what it takes at least, ``cases`` what
every kernel is proved on.
"""
