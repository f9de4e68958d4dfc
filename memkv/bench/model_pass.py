"""The bare model as transformers runs it: what ingest is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from memkv.config import Config
from memkv.model.loader import load_model
from memkv.model.support import ModelSpec
from memkv.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ModelPass:
    """Attributes:
    base: the model without its head, with an attention of transformers' own.
    batch: sequences in one pass.
    """

    base: nn.Module
    tokenizer: TextTokenizer
    spec: ModelSpec
    batch: int

    @classmethod
    def load(cls, config: Config, batch: int) -> ModelPass:
        """Loads the configured model a second time, on the CPU; raises as `load_model`."""
        models_dir = Path(config.model.models_dir).expanduser() if config.model.models_dir else None
        dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
        loaded = load_model(config.model.model, dtype=dtype, models_dir=models_dir)
        loaded.module.set_attn_implementation("sdpa")
        return cls(loaded.module.base_model, TextTokenizer(loaded.tokenizer), loaded.spec, batch)

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequence[int]]) -> None:
        """One forward pass per batch of sequences, which all have the same length."""
        for start in range(0, len(sequences), self.batch):
            ids = torch.tensor(sequences[start : start + self.batch])  # [batch, tokens]
            self.base(input_ids=ids, use_cache=False)
