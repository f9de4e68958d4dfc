"""A model's decoder layers compiled by torch: what stands between two matrix products becomes one kernel.

Projections q, k and v are fused before. Attention stays what it is: `attend` is no part of what is
compiled. Lengths are symbols, so that the layers, which share their code, are compiled a few times in all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from memkv.kernels import AttentionResult
from memkv.model.attention import ATTENTION_NAME, Kernels, StepContext, attend, forward, layer_attention
from memkv.model.fused_projections import find_projections, fuse
from memkv.model.loader import LoadedModel

_log = logging.getLogger(__name__)
_LENGTHS = (33, 64, 1, 2, 1000)  # what one of them compiles serves all that come later
# Products of one row become kernels of their own, tuned: without attention, a token of an answer of the 8B
# shape took 4.1 ms on an H200 instead of 5.0.
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"coordinate_descent_tuning": True}
# q, k and v in one product took 14 us instead of 19 for one row, 17 instead of 27 for 64. Gate and up are
# large already: 66 instead of 67 for 64 rows, and for one row what follows them took 54 instead of 35.
_LEAST_FUSED = 3
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the largest logit


def compile_layers(model: LoadedModel) -> bool:
    """Compiles a model on a GPU, and keeps it as it was where that fails or gives other logits.

    Takes half a minute, less where torch's cache on disk has it. Returns whether it is compiled.
    """
    layers = _decoder_layers(model)
    if not layers:
        _log.warning("%s is not compiled: its decoder layers were not found", model.name)
        return False
    if "forward" in layers[0].__dict__:
        return True  # another engine's
    started = time.monotonic()
    expected: list[Tensor] = []
    groups = find_projections(layers, lambda: expected.append(_logits(model, _LENGTHS[0])))
    for group in groups:
        if len(group) >= _LEAST_FUSED:
            fuse(group)
    not_compiled = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION_NAME, not_compiled)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, options=_OPTIONS)
    try:
        found, *_ = (_logits(model, length) for length in _LENGTHS)
        error = float((found - expected[0]).abs().max() / expected[0].abs().max())
        wrong = "" if error <= _TOLERANCE[model.module.dtype] else f"its logits are off by {error:.2g}"
    except Exception as failure:  # noqa: BLE001  # whatever a compiler raises
        wrong = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if wrong:
        for module in _changed(layers):
            del module.forward
        _log.warning("%s is served without compilation: %s", model.name, wrong)
        return False
    _log.info("%s was compiled in %.1f s", model.name, time.monotonic() - started)
    return True


@contextmanager
def uncompiled(model: LoadedModel) -> Iterator[None]:
    """The model as transformers made it, meanwhile."""
    kept = {module: module.__dict__.pop("forward") for module in _changed(_decoder_layers(model))}
    try:
        yield
    finally:
        for module, changed in kept.items():
            module.forward = changed


def _changed(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """What is in the layers and has a `forward` of its own: compiled ones, and fused projections."""
    return [module for layer in layers for module in layer.modules() if "forward" in module.__dict__]


def _decoder_layers(model: LoadedModel) -> list[nn.Module]:
    lists = [each for each in model.module.base_model.children() if isinstance(each, nn.ModuleList)]
    return next((list(each) for each in lists if len(each) == model.spec.num_layers), [])


def _logits(model: LoadedModel, length: int) -> Tensor:
    """Of the last of some tokens that attend to nothing but themselves."""
    device = model.module.device
    rows = torch.arange(length, device=device)
    context = StepContext(
        layers=layer_attention(model.spec, device),
        caches=[(rows, rows)] * model.spec.num_layers,
        slots=rows,
        plan=None,  # type: ignore[arg-type]  # nothing reads it
        kernels=Kernels(write_kv=lambda *_: None, paged_attention=_own_value),
    )
    ids = rows % model.spec.vocab_size
    logits = forward(model.module, ids, rows, context, rows[-1:])
    assert logits is not None
    return logits.float()


def _own_value(query: Tensor, *_: object, **__: object) -> AttentionResult:
    return AttentionResult(query.contiguous())
