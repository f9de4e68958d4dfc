"""Every byte string is a text that one rule made, or an error that says what to do."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memkv.errors import (
    BadRequestError,
    EmptyDocument,
    MemKVError,
    PayloadTooLargeError,
    UnprocessableDocumentError,
    UnsupportedMediaTypeError,
)
from memkv.text.reader import (
    ACCEPTED,
    SourceText,
    accept_text,
    clean_question,
    clean_text,
    has_visible_text,
    read_text,
)

TEXT = "Grüße, 世界! 👩‍👧\nSecond line."


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode("utf-16"),
        b"\xfe\xff" + TEXT.encode("utf-16-be"),
        TEXT.encode("utf-32"),
        b"\x00\x00\xfe\xff" + TEXT.encode("utf-32-be"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        TEXT.replace("\n", "\r\n").encode(),
        TEXT.replace("\n", "\r").encode("utf-16"),
    ],
)
def test_every_unicode_form_gives_the_same_text(data: bytes) -> None:
    assert read_text(data, "a.txt").text == TEXT


def test_what_was_decided_is_reported() -> None:
    source = read_text(b"\xef\xbb\xbfa\r\nb\rc \xef\xbf\xbd", "a.txt", "text/plain")
    assert source.text == "a\nb\nc \ufffd"
    assert [note.split()[0] for note in source.notes] == ["removed", "2", "1"]
    assert "UTF-16-LE" in read_text("plain English".encode("utf-16-le")).notes[0]
    assert read_text(b"a\rb").notes == ("1 line end became LF",)
    assert read_text(b"plain").notes == ()


@pytest.mark.parametrize(
    "data",
    [
        "世界人権宣言は、基本的人権を定める。".encode(
            "utf-16-le"
        ),  # hardly a zero byte: it could be anything
        b"a\x00",
        b"a\x00b\x00c",
        bytes(range(256)),
        b"a\x00b",
        TEXT.encode("utf-16-le")[:-1] + b"\xd8",  # half a surrogate pair
        "caf\xe9".encode("latin-1"),
        "日本語".encode("shift_jis"),
        b"\xff\xfe\x00\xd8",
        b"\xed\xa0\x80",  # a surrogate, encoded as no UTF-8 may be
    ],
)
def test_what_is_not_surely_text_is_refused_with_a_hint(data: bytes) -> None:
    with pytest.raises(UnprocessableDocumentError) as caught:
        read_text(data, "a.txt")
    assert caught.value.hint


@pytest.mark.parametrize("codec", ["cp500", "cp037", "cp1140"])
def test_ebcdic_is_told_by_its_name(codec: str) -> None:
    text = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 3
    with pytest.raises(UnprocessableDocumentError) as caught:
        read_text(text.encode(codec), "a.txt")
    assert "iconv -f CP500" in caught.value.hint
    for other in (
        "caf\xe9 @ home".encode("latin-1"),
        ("日本語のテキスト　" * 9).encode("shift_jis"),
        b"\x40\xff",
    ):
        with pytest.raises(UnprocessableDocumentError) as caught:
            read_text(other, "a.txt")
        assert "CP500" not in caught.value.hint


def test_real_files_in_odd_encodings(real_data: Path) -> None:
    with pytest.raises(UnprocessableDocumentError) as caught:
        read_text((real_data / "odd_files" / "english.cp500.txt").read_bytes(), "english.cp500.txt")
    assert "CP500" in caught.value.hint
    source = read_text((real_data / "odd_files" / "nobom-utf16le.txt").read_bytes(), "nobom-utf16le.txt")
    assert source.text.isascii()
    assert "UTF-16-LE" in source.notes[0]
    assert "UTF-16 of mostly Latin letters without one" in ACCEPTED


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800", "\udc00"])
def test_json_text_is_held_to_the_same_rule(text: str) -> None:
    with pytest.raises(UnprocessableDocumentError):
        clean_text(text)
    with pytest.raises(BadRequestError):
        clean_question(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n" * 100_000,
        "\ufeff",
        "\u200b" * 1000,
        "\u2800\u3164",
        "\x01\x02",
        "\u00ad\u2028",
        "\ufe0f",
    ],
)
def test_nothing_visible_is_an_empty_document(text: str) -> None:
    for refused in (lambda: clean_text(text), lambda: read_text(text.encode(), "a.md")):
        with pytest.raises(EmptyDocument) as caught:
            refused()
        assert caught.value.code == "empty_document"
    with pytest.raises(BadRequestError):
        clean_question(text)


@pytest.mark.parametrize("text", ["a", ".", "\u200bé", "👍", "e\u0301"])
def test_one_visible_character_is_a_document(text: str) -> None:
    assert clean_text(text) == text
    assert has_visible_text(text)


def test_composed_and_decomposed_letters_stay_as_they_came() -> None:
    for text in ("é", "e\u0301", "\uf900 is not \u8c48"):  # NFC would make the last two characters one
        assert clean_text(text) == text


@settings(deadline=None)
@given(st.text())
@example("\ufeff\ufeffa\r\r\nb")
def test_upload_and_json_agree(text: str) -> None:
    from_json, from_upload = (
        outcome(lambda: accept_text(text)),
        outcome(lambda: read_text(text.encode(), "a.txt")),
    )
    assert type(from_json) is type(from_upload)
    if isinstance(from_json, SourceText) and isinstance(from_upload, SourceText):
        assert from_json.text == from_upload.text == clean_text(from_json.text)
        assert "\r" not in from_json.text
        assert from_json.text.encode().decode() == from_json.text


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["a.txt", "a.md", None, "b"]))
def test_any_bytes_are_accepted_or_refused(data: bytes, name: str | None) -> None:
    accepted_or_refused(data, name)


def outcome(read: Callable[[], SourceText]) -> SourceText | MemKVError:
    try:
        return read()
    except MemKVError as error:
        return error


def accepted_or_refused(data: bytes, name: str | None) -> str:
    found = outcome(lambda: read_text(data, name))
    if isinstance(found, MemKVError):
        assert found.status in (413, 415, 422)
        assert found.hint
        return type(found).__name__
    assert "\x00" not in found.text
    assert has_visible_text(found.text)
    assert found.text.encode().decode() == found.text
    return "accepted"


ODD_FILES = {
    "blns.txt": "accepted",
    "xss.md": "accepted",
    "nobom-utf16le.txt": "accepted",
    "english.cp500.txt": "UnprocessableDocumentError",
}


def test_odd_files_are_accepted_or_refused_in_time(real_data: Path) -> None:
    files = sorted((real_data / "odd_files").iterdir())
    assert {path.name for path in files} >= set(ODD_FILES)
    for path in files:
        started = time.perf_counter()
        outcome = accepted_or_refused(path.read_bytes(), path.name)
        accepted_or_refused(path.read_bytes(), None)
        assert time.perf_counter() - started < 10.0
        assert outcome == ODD_FILES.get(path.name, "UnsupportedMediaTypeError"), path.name


def test_mutated_files_are_accepted_or_refused(real_data: Path) -> None:
    generator = random.Random(20)
    originals = [path.read_bytes()[:3000] for path in sorted((real_data / "odd_files").iterdir())]
    seen = set()
    for _ in range(2000):
        data = bytearray(generator.choice(originals))
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(data))
            data[at : at + generator.randint(0, 3)] = generator.randbytes(generator.randint(0, 3))
        seen.add(accepted_or_refused(bytes(data), None))
    assert seen == {"accepted", "UnprocessableDocumentError", "UnsupportedMediaTypeError"}


@pytest.mark.parametrize(
    ("name", "declared", "kind"),
    [
        ("a.txt", None, "text/plain"),
        ("A.MD", "application/octet-stream", "text/markdown"),
        ("a.markdown", "text/plain; charset=utf-8", "text/markdown"),
        ("README", "", "text/plain"),
        (None, "text/x-markdown", "text/markdown"),
        (r"C:\docs\a.md", "TEXT/MARKDOWN", "text/markdown"),
        ("../../etc/passwd\x00.txt", None, "text/plain"),
    ],
)
def test_accepted_types(name: str | None, declared: str | None, kind: str) -> None:
    assert read_text(b"# A\n", name, declared).media_type == kind


@pytest.mark.parametrize(
    ("data", "name", "declared"),
    [
        (b"<p>a</p>", "a.html", None),
        (b"a", "a.pdf", "text/plain"),
        (b"a", "a.txt", "application/pdf"),
        (b"a", None, "text/html"),
        (b"%PDF-1.4 only ASCII", "a.txt", "text/plain"),
        (b"{\\rtf1 hello}", None, None),
        (b"PK\x03\x04", None, None),
    ],
)
def test_other_types_are_refused_by_name(data: bytes, name: str | None, declared: str | None) -> None:
    with pytest.raises(UnsupportedMediaTypeError) as caught:
        read_text(data, name, declared)
    assert ".txt" in caught.value.hint
    assert ".md" in caught.value.hint


def test_a_declared_charset_is_believed_and_an_unknown_one_refused() -> None:
    assert read_text("déjà".encode("latin-1"), None, "text/plain; charset=ISO-8859-1").text == "déjà"
    assert read_text("日本".encode("shift_jis"), "a.txt", 'text/plain; charset="shift_jis"').text == "日本"
    assert read_text("é".encode("utf-16"), None, "text/plain; charset=iso-8859-1").text == "é"
    with pytest.raises(UnprocessableDocumentError):
        read_text(b"a", None, "text/plain; charset=rot13")
    with pytest.raises(UnprocessableDocumentError):
        read_text("é".encode("latin-1"), None, "text/plain; charset=utf-8")


def test_the_limit_is_exact_and_counts_bytes() -> None:
    assert read_text("é".encode() * 5, max_bytes=10).text == "é" * 5
    assert accept_text("é" * 5, max_bytes=10).text == "é" * 5
    with pytest.raises(PayloadTooLargeError):
        read_text("é".encode() * 5 + b"a", max_bytes=10)
    with pytest.raises(PayloadTooLargeError):
        accept_text("é" * 5 + "a", max_bytes=10)


def test_titles() -> None:
    assert read_text(b"intro\n# The  title #\ntext", "x.md").title == "The title"
    assert read_text(b"# not a heading here", "annual_report 2024.txt").title == "annual report 2024"
    assert read_text(b"text", "/a/b\x07.md").title == "b"
    assert accept_text("# Heading\n", "text/markdown").title == "Heading"
    assert accept_text("# Heading\n").title == ""


@pytest.mark.parametrize("module", ["reader", "prompt", "chunker", "citations", "tokenizer"])
def test_text_modules_do_not_load_torch(module: str) -> None:
    code = (
        f"import sys, memkv.text.{module}\n"
        "print([m for m in ('torch', 'transformers', 'sqlalchemy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
