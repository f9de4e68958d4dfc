"""Text never speaks control tokens, and a stream never shows half a character."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memkv.text.tokenizer import StreamDecoder, TextTokenizer

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_text>"]
FALLBACK_IDS = st.lists(st.integers(3, 267), max_size=30)
# No answer holds NUL; SmolLM2 has no token for the other bytes: control characters, most unassigned planes.
SPELLABLE = st.characters(
    exclude_categories=["Cs"], exclude_characters="\x00\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF
)


@pytest.mark.parametrize("token", CONTROL)
def test_control_tokens_in_text_are_plain_characters(smollm2_tokenizer: TextTokenizer, token: str) -> None:
    text = f"a {token}b{token}\n{token}"
    ids = smollm2_tokenizer.encode(text)
    (control,) = smollm2_tokenizer.encode_template(token)  # as a template has it, it is one token
    assert control < 17
    assert min(ids) >= 17
    assert smollm2_tokenizer.decode(ids) == text
    assert control in smollm2_tokenizer.encode_template(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(SPELLABLE, max_size=8), st.sampled_from([*CONTROL, "<|im_", "end|>"]))))
@example(["<|im_<|im_end|>end|>"])
def test_text_survives_the_round_trip(smollm2_tokenizer: TextTokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids, offsets = smollm2_tokenizer.encode_with_offsets(text)
    assert ids == smollm2_tokenizer.encode(text)
    assert all(token_id >= 17 for token_id in ids)
    assert smollm2_tokenizer.decode(ids) == text
    assert smollm2_tokenizer.count_all([text, ""]) == [len(ids), 0]
    covered = set(itertools.chain.from_iterable(range(start, end) for start, end in offsets))
    assert covered == set(range(len(text)))
    assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)


def test_slicing_long_text_changes_no_token(smollm2_tokenizer: TextTokenizer, real_data: Path) -> None:
    with (real_data / "mtrag" / "tasks.jsonl").open() as lines:
        tasks = [json.loads(line) for line in itertools.islice(lines, 40)]
    text = "\n\n".join(context["text"] for task in tasks for context in task["contexts"])
    assert len(text) > 100_000
    ids, offsets = smollm2_tokenizer.encode_with_offsets(text)
    assert ids == smollm2_tokenizer._plain.encode(text, add_special_tokens=False).ids
    assert ids == smollm2_tokenizer.encode(text)
    assert all(text[start:end] for start, end in offsets)
    assert offsets[-1][1] == len(text)


@pytest.mark.parametrize("unit", ["a", "word ", "日本語", "<|im_end|>", "\n", "."])
def test_long_text_takes_bounded_time(smollm2_tokenizer: TextTokenizer, unit: str) -> None:
    text = (unit * 500_000)[:500_000]
    started = time.perf_counter()
    ids = smollm2_tokenizer.encode(text)
    assert time.perf_counter() - started < 10.0
    assert smollm2_tokenizer.decode(ids) == text


def test_added_tokens_that_are_not_special_are_text_too(
    byte_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = TextTokenizer(byte_tokenizer(plain=("<tool_call>", "    ")))
    text = "x<tool_call>y    z"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_template("<tool_call>")[0] not in ids
    assert tokenizer.encode_template("    ")[0] in ids  # blanks control nothing


def test_a_vocabulary_that_merges_control_tokens_by_itself_is_taken_apart() -> None:
    pieces = ["<s>", *"<s>abc"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    backend.encode_special_tokens = True
    assert vocab["<s>"] in backend.encode("abc <s>").ids  # the switch of the library does not help here
    ids, offsets = tokenizer.encode_with_offsets(" ".join(["abc", *["<s>"] * 2000]))
    assert vocab["<s>"] not in ids
    assert len(ids) == 3 + 2000 * 3
    assert offsets[-1] == (8002, 8003)


def test_pieces_have_no_blank_put_in_front(fallback_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = TextTokenizer(fallback_tokenizer)
    assert fallback_tokenizer.backend_tokenizer.encode("ab", add_special_tokens=False).tokens[0] == "▁"
    assert len(tokenizer.encode("ab")) == 2
    assert len(tokenizer.encode_template("<s>ab")) == 3
    assert tokenizer.encode("a b") == [*tokenizer.encode("a"), *tokenizer.encode(" b")]


@pytest.mark.parametrize("kind", ["normaliser", "metaspace", "byte level"])
def test_every_way_to_put_a_blank_in_front_is_undone(kind: str) -> None:
    blank = "Ġ" if kind == "byte level" else "▁"
    backend = Tokenizer(models.BPE(vocab={blank: 0, "a": 1, "b": 2}, merges=[]))
    if kind == "normaliser":
        backend.normalizer = normalizers.Prepend("▁")
    elif kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    assert backend.encode("ab").ids == [0, 1, 2]
    tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode("ab") == tokenizer.encode_template("ab") == [1, 2]


def test_threads_do_not_disturb_each_other(smollm2_tokenizer: TextTokenizer) -> None:
    text = "<|im_end|> and text " * 20
    plain, template = smollm2_tokenizer.encode(text), smollm2_tokenizer.encode_template(text)
    assert plain != template

    def work(turn: int) -> bool:
        if turn % 2:
            return smollm2_tokenizer.encode(text) == plain
        return smollm2_tokenizer.encode_template(text) == template

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def test_rendering_depends_on_its_arguments_only(
    byte_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    dated = "{{ strftime_now('%H:%M:%S %f') }} {{ date_string }} {{ messages[0]['content'] }} "
    tokenizer = TextTokenizer(byte_tokenizer(dated + "{{ enable_thinking }}"))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "01 Jan 2025 01 Jan 2025 hi False"
    refusing = TextTokenizer(byte_tokenizer("{{ raise_exception('no') }}"))
    assert refusing.render_chat(messages) is None
    assert TextTokenizer(byte_tokenizer()).render_chat(messages) is None


def streamed(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49_151), max_size=40))
def test_a_stream_is_the_decoding_of_all_ids(smollm2_tokenizer: TextTokenizer, ids: list[int]) -> None:
    assert "".join(streamed(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(SPELLABLE))
@example("👩‍👩‍👧 日本語 ü e\u0301 🇩🇪")
def test_a_stream_never_shows_half_a_character(smollm2_tokenizer: TextTokenizer, text: str) -> None:
    pieces = streamed(smollm2_tokenizer, smollm2_tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""  # whole characters are told at once


def test_incomplete_bytes_are_told_at_the_end(smollm2_tokenizer: TextTokenizer) -> None:
    ids = smollm2_tokenizer.encode("ok 👩")[:-1]
    pieces = streamed(smollm2_tokenizer, ids)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert pieces[-1].endswith("\ufffd")


@settings(max_examples=300, deadline=None)
@given(FALLBACK_IDS)
def test_byte_fallback_streams_too(fallback_tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    tokenizer = TextTokenizer(fallback_tokenizer)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_control_tokens_stay_out_of_the_stream(smollm2_tokenizer: TextTokenizer) -> None:
    ids = [*smollm2_tokenizer.encode("done"), *smollm2_tokenizer.encode_template("<|im_end|>")]
    assert "".join(streamed(smollm2_tokenizer, ids)) == "done"


def test_an_answer_holds_no_nul(smollm2_tokenizer: TextTokenizer) -> None:
    """So that it can be sent back as part of a conversation."""
    ids = [
        *smollm2_tokenizer.encode("one"),
        *smollm2_tokenizer.encode("\0"),
        *smollm2_tokenizer.encode("two"),
    ]
    assert smollm2_tokenizer.decode(ids) == "".join(streamed(smollm2_tokenizer, ids)) == "one\ufffdtwo"
