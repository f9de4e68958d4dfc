"""Projections of the same tensor as one product: q, k and v of a layer, or gate and up of an MLP.

    weights of q, k, v    three matrices, rows of one larger matrix from here on
    the first of them     multiplies by the larger one and keeps the product
    all                   take their columns of it

A GPU that multiplies few rows is done sooner with one large matrix than with several small ones. What is kept
in between exists while a layer is traced: compiled, it is one product and views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def find_projections(layers: Iterable[nn.Module], run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Linear layers that are given the very same tensor, in the order in which they are.

    Args:
        layers: each is looked at by itself.
        run: a pass through all of them.

    Returns:
        groups of two and more that can be fused: each called once in the pass, alike in dtype and bias.
    """
    calls: list[tuple[nn.Module, nn.Linear, Tensor]] = []

    def note(layer: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and type(module) is nn.Linear:
                calls.append((layer, module, inputs[0]))

        return hook

    hooks = [
        module.register_forward_pre_hook(note(layer))
        for layer in layers
        for module in layer.modules()
        if type(module) is nn.Linear
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[int, int, torch.dtype, bool], list[nn.Linear]] = {}
    for layer, module, given in calls:  # which keeps all of these tensors: an id is one's own
        key = (id(layer), id(given), module.weight.dtype, module.bias is not None)
        groups.setdefault(key, []).append(module)
    modules = [module for _, module, _ in calls]
    return [
        group
        for group in groups.values()
        if len(group) > 1 and all(modules.count(module) == 1 for module in group)
    ]


def fuse(group: list[nn.Linear]) -> None:
    """Makes a group of `find_projections` one product. Deleting their `forward` undoes it."""
    with torch.no_grad():
        weight = torch.cat([each.weight for each in group])
        bias = None if group[0].bias is None else torch.cat([each.bias for each in group])
    product = _Product(weight, bias)
    first = 0
    for each in group:
        last = first + each.out_features
        each.weight.data = weight[first:last]  # the same numbers, once in memory
        if bias is not None:
            each.bias.data = bias[first:last]
        each.part = _Part(product, first, last, is_last=each is group[-1])  # type: ignore[assignment]
        # One function for all of them: layers that differ in nothing else share what is compiled.
        each.forward = MethodType(_forward_part, each)  # type: ignore[method-assign]
        first = last


class _Product:
    """Of one tensor and the rows of all weights of a group."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.given: Tensor | None = None
        self.made: Tensor | None = None

    def of(self, given: Tensor) -> Tensor:
        if self.made is None or self.given is not given:
            self.given, self.made = given, functional.linear(given, self.weight, self.bias)
        return self.made


@dataclass(frozen=True, slots=True)
class _Part:
    """The columns of a product that are one projection's."""

    product: _Product
    first: int
    last: int
    is_last: bool  # of those that take theirs


def _forward_part(module: nn.Linear, given: Tensor) -> Tensor:
    part: _Part = module.part  # type: ignore[assignment]
    product = part.product
    made = product.of(given)[..., part.first : part.last]
    if part.is_last:
        product.given = product.made = None
    return made
