"""Projections that are given the same tensor are one product, and give what they gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkv.model.fused_projections import find_projections, fuse


class Layer(nn.Module):
    """An attention and an MLP as far as their projections go."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, size, bias=bias) for size in (8, 4, 4))
        self.out = nn.Linear(16, 8)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        x = x + self.out(torch.cat([self.q(normal), self.k(normal), self.v(normal)], dim=-1))
        normal = self.norm(x)
        return x + self.down(self.gate(normal).relu() * self.up(normal))


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_they_are_found_and_give_what_they_gave(bias: bool) -> None:
    torch.manual_seed(0)
    layers = [Layer(bias).requires_grad_(False) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(3, 8)
    expected = model(x)
    groups = find_projections(layers, lambda: model(x))
    names = {id(module): name for layer in layers for name, module in layer.named_modules()}
    assert [[names[id(each)] for each in group] for group in groups] == 2 * [["q", "k", "v"], ["gate", "up"]]
    before = {id(weight): weight.clone() for weight in model.parameters()}
    products: list[int] = []
    linear = nn.functional.linear
    for group in groups:
        fuse(group)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            nn.functional,
            "linear",
            lambda x, weight, *rest: products.append(len(weight)) or linear(x, weight, *rest),
        )
        found = model(x)
    assert products == 2 * [16, 8, 24, 8]
    torch.testing.assert_close(found, expected)
    for weight in model.parameters():
        assert torch.equal(weight, before[id(weight)])
    assert len({each.weight.untyped_storage().data_ptr() for each in groups[0]}) == 1, "kept twice"
    torch.testing.assert_close(model(2 * x), _without_parts(layers, lambda: model(2 * x)))


def _without_parts(layers: list[Layer], run: Callable[[], Tensor]) -> Tensor:
    for module in (module for layer in layers for module in layer.modules()):
        module.__dict__.pop("forward", None)
    return run()


def test_what_is_called_twice_or_given_something_else_stays_as_it_is() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.no_bias = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.a(x + 1) + self.b(x) + self.c(x * 2) + self.no_bias(x)

    odd, x = Odd(), torch.randn(2, 4)
    assert find_projections([odd], lambda: odd(x)) == []


@pytest.mark.parametrize(("name", "sizes"), [("llama", [3, 2]), ("qwen2", [3, 2])])
def test_of_a_model_of_transformers(
    name: str, sizes: list[int], tiny_model_dir: Callable[[str], Any]
) -> None:
    from memkv.model import compilation
    from memkv.model.loader import load_model

    model = load_model(str(tiny_model_dir(name)))
    layers = compilation._decoder_layers(model)
    groups = find_projections(layers, lambda: compilation._logits(model, 5))
    assert [len(group) for group in groups] == len(layers) * sizes
