"""Continuous batching over the operations of serving, in plain JAX: an example to copy from. ``ejkernel bench serve``
measures it, and ``serve-step`` a step of it.

``generate`` streams the tokens of requests. A model is a function of a step's tokens; ``models`` has two.
"""

from __future__ import annotations

from .engine import Engine, Limits, Output, generate
from .models import Decoder, decoder, init_params
from .pages import PagePool
from .scheduler import Request
from .weights import load

__all__ = ["Decoder", "Engine", "Limits", "Output", "PagePool", "Request", "decoder", "generate", "init_params", "load"]
