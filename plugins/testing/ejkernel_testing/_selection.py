"""Which examples of an operation a kernel is proved on: those without a feature that it is declared to refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ejkernel_core import Example

Examples = Sequence[Example]

#: In which dtype a kernel that refuses float32 is proved under transformations: the first that it takes.
NARROW = ("bfloat16", "float16")


@attrs.frozen(eq=False)
class Selection:
    """The examples of one kernel, by what it has to do with them."""

    #: Run them, with gradients.
    accepted: Examples
    #: Run them, and refuse their gradients.
    without_gradients: Examples
    #: Refuse them.
    refused: Examples
    #: The features by which it refuses.
    features: frozenset[str]

    @property
    def values(self) -> Examples:
        """The examples whose values are compared. Those whose gradients are refused are differentiated by nothing."""
        forward_only = (attrs.evolve(example, wrt=()) for example in self.without_gradients)
        return [example for example in (*self.accepted, *forward_only) if "values" in example.checks]

    @property
    def of_several_results(self) -> Examples:
        """The examples on which each result is computed alone: the first short one, and all that say so."""
        short = (example for example in self.accepted if "values" in example.checks and not example.long)
        first = next(short, None)
        return [example for example in self.accepted if example is first or "needed" in example.checks]

    @property
    def variations(self) -> list[tuple[Example, Example]]:
        """Each example with each of its variations that the kernel takes."""
        pairs = ((example, variation) for example in self.accepted for variation in example.variations)
        return [(example, variation) for example, variation in pairs if not variation.features & self.features]

    @property
    def checks(self) -> frozenset[str]:
        """The checks that are made."""
        words = {word for example in self.accepted for word in example.checks} - {"sensitivity"}
        words |= {"values"} if self.values else set()
        return frozenset(words | ({"sensitivity"} if self.variations else set()))

    @property
    def unproved(self) -> dict[str, list[str]]:
        """Each check that is not made because all of its examples are refused, and the features by which they are."""
        features: dict[str, set[str]] = {}
        for example in (*self.without_gradients, *self.refused):
            for word in example.checks - self.checks:
                features.setdefault(word, set()).update(example.features & self.features)
        for example in self.accepted:
            for word in example.checks - self.checks:  # "sensitivity", of which every variation is refused
                of_variations = {feature for variation in example.variations for feature in variation.features}
                features.setdefault(word, set()).update(of_variations & self.features)
        return {word: sorted(features[word]) for word in sorted(features)}

    def check_complete(self, kernel: str, declared: frozenset[str]) -> None:
        """Raise if a check is not made, unless the kernel declares it, or if it declares one that is made."""
        undeclared = {word: features for word, features in self.unproved.items() if word not in declared}
        lines = (f"  {word}: its examples are refused, by {', '.join(undeclared[word])}" for word in undeclared)
        assert not undeclared, (
            f"checks: {kernel}: no example is left for {len(undeclared)} checks:\n" + "\n".join(lines) + "\n"
            "Return examples that the kernel takes from `examples` of its proofs. If there can be none, "
            f"declare UNPROVED = {{{', '.join(map(repr, undeclared))}}} in the kernel's module"
        )
        made = sorted(declared & self.checks)
        assert not made, f"checks: {kernel}: UNPROVED has {', '.join(made)}, for which there are examples"


def select(examples: Examples, refuses: frozenset[str], refuses_gradients: frozenset[str]) -> Selection:
    """Divide the examples by the features that a kernel, and its backward kernel, are declared to refuse."""
    runs = [example for example in examples if not example.features & refuses]
    return Selection(
        accepted=[example for example in runs if not example.features & refuses_gradients],
        without_gradients=[example for example in runs if example.features & refuses_gradients],
        refused=[example for example in examples if example.features & refuses],
        features=refuses | refuses_gradients,
    )


def in_16_bits(examples: Examples, refuses: frozenset[str]) -> Iterator[Example]:
    """For a kernel that refuses float32: the examples for transformations, which are in float32, in 16 bits.

    Of the others, operations have examples in every dtype.
    """
    dtype = next((name for name in NARROW if name not in refuses), None)
    if "float32" in refuses and dtype is not None:
        yield from (
            _narrowed(example, dtype) for example in examples if example.dtype == "float32" and _is_subject(example)
        )


def _is_subject(example: Example) -> bool:
    return bool(example.checks - {"values"})


def _narrowed(example: Example, dtype: str) -> Example:
    return attrs.evolve(
        example,
        name=f"{example.name}-{dtype}",
        dtype=dtype,
        features=example.features - {"float32"} | {dtype},
        variations=tuple(_narrowed(variation, dtype) for variation in example.variations),
    )
