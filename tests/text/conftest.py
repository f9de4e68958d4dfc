"""The tokenizer of the real model, and small ones of the kinds that other models bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from memkv.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> TextTokenizer:
    return TextTokenizer(AutoTokenizer.from_pretrained(smollm2, local_files_only=True))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """(chat_template, control tokens, plain added tokens) -> a byte-level tokenizer without merges."""

    def build(
        chat_template: str | None = None,
        control: tuple[str, ...] = ("<start>", "<end>"),
        plain: tuple[str, ...] = (),
    ) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=chat_template, bos_token=control[0]
        )

    return build


@pytest.fixture(scope="session")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As sentencepiece models have it: a blank in front of each text, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
