"""The requests of ``ejkernel bench serve``: lengths as of a public chat set, and when they arrive.

The figures are those that Sarathi-Serve (Agrawal and others, OSDI '24) gives for openchat_sharegpt4.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from .serving import Request

#: The 90th percentile of the normal distribution.
NORMAL_P90 = 1.2815515655446004


@attrs.frozen
class LogNormal:
    """Lengths in tokens, by two of their percentiles."""

    median: float
    p90: float

    @property
    def sigma(self) -> float:
        """That of the logarithm.

        >>> round(PROMPTS.sigma, 3), round(ANSWERS.sigma, 4)
        (0.93, 0.5446)
        """
        return math.log(self.p90 / self.median) / NORMAL_P90

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.median * np.exp(self.sigma * rng.standard_normal(count))


PROMPTS, ANSWERS = LogNormal(1730, 5696), LogNormal(415, 834)


@attrs.frozen(eq=False)
class Load:
    """Requests, and the second in which each of them arrives."""

    requests: tuple[Request, ...]
    arrivals: tuple[float, ...]

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the prompts, and of the answers."""
        prompts = np.array([len(request.prompt) for request in self.requests])
        return prompts, np.array([request.max_tokens for request in self.requests])


def draw_lengths(
    rng: np.random.Generator, count: int, longest: int, shorter: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Of prompts and answers, at least 1. A prompt is cut where it has more than ``longest`` tokens with its answer."""
    prompts, answers = (np.ceil(of.draw(rng, count) / shorter).astype(int) for of in (PROMPTS, ANSWERS))
    answers = np.minimum(answers, longest - 1)
    return np.minimum(prompts, longest - answers), answers


def draw_load(
    count: int, vocabulary: int, longest: int, seed: int = 0, rate: float | None = None, shorter: float = 1.0
) -> Load:
    """Greedy requests of random tokens. Without a ``rate`` in a second, all arrive at once."""
    rng = np.random.default_rng(seed)
    prompts, answers = draw_lengths(rng, count, longest, shorter)
    gaps = np.zeros(count) if rate is None else rng.exponential(1 / rate, count)
    requests = (
        Request(rng.integers(0, vocabulary, length).tolist(), max_tokens=int(most))
        for length, most in zip(prompts, answers, strict=True)
    )
    return Load(tuple(requests), tuple(np.cumsum(gaps).tolist()))
