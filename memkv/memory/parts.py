"""What a `Memory` is made of, opened together and closed together."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from memkv.config import Config
from memkv.engine.engine import Engine
from memkv.engine.engines import Engines
from memkv.engine.limits import host_bytes, pool_bytes
from memkv.memory.stored import open_store
from memkv.model.install import default_models_dir, resolve
from memkv.model.loader import LoadedModel, load_model
from memkv.store.store import Store
from memkv.text.cutter import Cutter
from memkv.text.embedder import Embedder
from memkv.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Parts:
    """Attributes:
    known_vectors: of texts about to be ingested, by text; each is taken out when it is used.
    """

    config: Config
    store: Store
    model: LoadedModel
    tokenizer: TextTokenizer
    cutter: Cutter
    embedder: Embedder
    engine: Engine | Engines
    known_vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, on_progress: Callable[[str], None]) -> Parts:
        """Opens the store first: a store that is held elsewhere is refused before a model is loaded."""
        with ExitStack() as opened:
            store = opened.enter_context(closing(open_store(config)))
            on_progress(f"loading {config.model.model}")
            models = _load_on_each_device(config)
            devices = [each.device for each in models]
            pool, host = pool_bytes(config.engine, devices), host_bytes(config.engine, devices)
            config = replace(config, engine=replace(config.engine, pool_bytes=pool, host_bytes=host))
            tokenizer = TextTokenizer(models[0].tokenizer)
            cutter = Cutter(tokenizer)
            on_progress(f"loading {config.model.embedder}")
            embedder = load_embedder(config)
            engines = [
                opened.enter_context(Engine(each, kv_dtype=config.kv.dtype, config=config.engine))
                for each in models
            ]
            opened.pop_all()  # nothing failed: they stay open
        gc.collect()
        gc.freeze()  # a pass over all that was loaded takes a tenth of a second, in the middle of an answer
        engine = engines[0] if len(engines) == 1 else Engines(engines)
        return cls(config, store, models[0], tokenizer, cutter, embedder, engine)

    def close(self, drain_seconds: float) -> None:
        try:
            self.engine.close(drain_seconds)
        finally:
            self.cutter.close()
            self.store.close()
            gc.unfreeze()


def models_dir(config: Config) -> Path:
    """Where models that are known by name lie."""
    return Path(config.model.models_dir).expanduser() if config.model.models_dir else default_models_dir()


def _load_on_each_device(config: Config) -> list[LoadedModel]:
    """One for each device of the list that `model.device` is; a device that is named twice shares one."""
    devices = [device.strip() for device in config.model.device.split(",")]
    models = {
        device: load_language_model(replace(config, model=replace(config.model, device=device)))
        for device in dict.fromkeys(devices)
    }
    return [models[device] for device in devices]


def load_language_model(config: Config) -> LoadedModel:
    """On the one device that the configuration names."""
    device, dtype = choose_device(config)
    return load_model(
        config.model.model, dtype=dtype, device=device, allow_download=True, models_dir=models_dir(config)
    )


def choose_device(config: Config) -> tuple[str, str]:
    """Device and dtype, with what "auto" means here."""
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return device, dtype


def load_embedder(config: Config) -> Embedder:
    return Embedder.load(resolve(config.model.embedder, models_dir(config), allow_download=True))
