"""A model whose layers cannot be compiled, or compute something else then, is served as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memkv.model.compilation import compile_layers, uncompiled
from memkv.model.loader import LoadedModel, load_model

Compile = Callable[..., Callable[..., Any]]


@pytest.fixture
def model(tiny_model_dir: Callable[[str], Any]) -> LoadedModel:
    return load_model(str(tiny_model_dir("llama")))  # of its own: it is changed


def as_it_is(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **kwargs)


def wrong(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: 1.5 * forward(*args, **kwargs)


def broken(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler was found")

    return fail


@pytest.mark.parametrize(("compiler", "reason"), [(wrong, "off by"), (broken, "no compiler was found")])
def test_what_does_not_compute_the_same_is_put_back(
    model: LoadedModel,
    compiler: Compile,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "compile", compiler)
    assert not compile_layers(model)
    assert all("forward" not in layer.__dict__ for layer in model.module.model.layers)
    assert reason in caplog.text


def test_compiled_layers_are_compiled_once_and_can_be_left_out(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: calls.append(forward) or as_it_is(forward))
    layers = list(model.module.model.layers)
    assert compile_layers(model) and compile_layers(model)
    assert len(calls) == len(layers)
    with uncompiled(model):
        assert all("forward" not in layer.__dict__ for layer in layers)
    assert all("forward" in layer.__dict__ for layer in layers)
