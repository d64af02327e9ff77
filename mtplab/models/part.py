"""What the parts of a model have in common: they know their linear layers, and can be had again with others.

Knows nothing of what a part computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

from mtplab.models.spec import MixtureSpec
from mtplab.quant.experts import Experts
from mtplab.quant.linear import PackedLinear

__all__ = ["Part", "Swap", "SwapExperts"]

Swap = Callable[[PackedLinear], PackedLinear]
SwapExperts = Callable[[Experts, MixtureSpec], Experts]


class Part:
    """A mixer, a feed or a layer, whose attributes are tensors, linear layers and other parts."""

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer of it."""
        for value in vars(self).values():
            if isinstance(value, PackedLinear):
                yield value
            elif isinstance(value, Part):
                yield from value.linears()

    def exchanged(self, swap: Swap, experts: SwapExperts) -> Self:
        """The same with other packed linear layers and other experts, and everything else shared."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            found = self._other(value, swap, experts)
            if found is not value:
                setattr(made, name, found)
        return made

    def _other(self, value: Any, swap: Swap, experts: SwapExperts) -> Any:
        if isinstance(value, PackedLinear):
            return swap(value)
        return value.exchanged(swap, experts) if isinstance(value, Part) else value
