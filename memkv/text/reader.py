"""What counts as text: one rule for uploads, for JSON and for questions.

Bytes are decoded by byte order mark, else by the charset that the sender declared, else as UTF-8. UTF-16
without a mark is read only where its zero bytes leave no doubt. Nothing else is guessed: in a legacy
encoding every byte string is valid, so a guess would store nonsense that no one notices.

Of the decoded text only two things change: leading byte order marks go, and CRLF and CR become LF. The code
points stay as they came; no NFC: it is not reversible (it replaces CJK compatibility ideographs, which occur
in names), and a tokenizer that wants it applies it itself. NUL is refused, because it is a sign of binary
data and PostgreSQL cannot store it; lone surrogates, because no UTF-8 exists for them.
"""

from __future__ import annotations

import string
import unicodedata
from dataclasses import dataclass
from pathlib import PurePosixPath

from memkv.errors import (
    BadRequestError,
    EmptyDocument,
    PayloadTooLargeError,
    UnprocessableDocumentError,
    UnsupportedMediaTypeError,
)

MAX_BYTES = 10_000_000
PLAIN, MARKDOWN = "text/plain", "text/markdown"
ACCEPTED = (
    "plain text (.txt, .text) and Markdown (.md, .markdown), in UTF-8, in UTF-16 or UTF-32 with a byte order "
    "mark, or in UTF-16 of mostly Latin letters without one"
)


@dataclass(frozen=True, slots=True)
class SourceText:
    """A document's text, ready to be stored and chunked.

    Attributes:
        text: never blank, without NUL or lone surrogates, its line ends LF.
        media_type: `text/plain` or `text/markdown`.
        notes: what was decided about the bytes and changed in the text, one sentence each.
        title: the first Markdown heading, else the file's name without its suffix, else empty.
    """

    text: str
    media_type: str
    notes: tuple[str, ...] = ()
    title: str = ""


def read_text(
    data: bytes, filename: str | None = None, media_type: str | None = None, *, max_bytes: int = MAX_BYTES
) -> SourceText:
    """Decodes an uploaded file. `filename` is only looked at for its suffix and as a title, never opened.

    Raises:
        UnsupportedMediaTypeError: the name, the declared type or the first bytes are not those of text.
        PayloadTooLargeError: more than `max_bytes`.
        UnprocessableDocumentError: bytes that are not the text they claim to be.
        EmptyDocument: nothing visible in it.
    """
    kind = _media_kind(filename, media_type)
    _refuse_signatures(data)
    _refuse_size(len(data), max_bytes)
    text, note = _decode(data, _declared_charset(media_type))
    notes = (note,) if note else ()
    return _accept(text, kind, notes, _stem(filename))


def accept_text(text: str, media_type: str = PLAIN, *, max_bytes: int = MAX_BYTES) -> SourceText:
    """The same rules for text that came decoded, in JSON or from a Python caller; raises as `read_text`."""
    kind = _media_kind(None, media_type)
    if len(text) > max_bytes:  # at least one byte each; spares encoding what is too long anyway
        _refuse_size(len(text), max_bytes)
    source = _accept(text, kind, (), "")
    _refuse_size(len(source.text.encode()), max_bytes)
    return source


def clean_text(text: str) -> str:
    """The text of `accept_text`."""
    return accept_text(text).text


def clean_question(text: str) -> str:
    """A question under the same rules. Raises BadRequestError where a document would be refused."""
    text, _ = _normalise(text)
    problem = _problem_with(text)
    if problem:
        raise BadRequestError(f"the question {problem}", hint="send the question as plain text")
    if not has_visible_text(text):
        raise BadRequestError("the question is blank", hint="ask something")
    return text


def has_visible_text(text: str) -> bool:
    """Whether anything would show: not only spaces, control, format (zero-width) and filler characters."""
    return any(not _is_invisible(char) for char in set(text))


# Letters and symbols by category that no one can see: Hangul fillers, the braille blank, Khmer inherent
# vowels, the combining grapheme joiner.
_FILLERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\u17b4\u17b5\u034f")
_SUFFIXES = {".txt": PLAIN, ".text": PLAIN, ".md": MARKDOWN, ".markdown": MARKDOWN}
_MEDIA_TYPES = {PLAIN: PLAIN, MARKDOWN: MARKDOWN, "text/x-markdown": MARKDOWN}
_UNTOLD = frozenset({"", "application/octet-stream", "binary/octet-stream"})
_SIGNATURES = (
    (b"%PDF-", "a PDF file"),
    (b"PK\x03\x04", "a ZIP archive or an Office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old Office document"),
    (b"{\\rtf", "an RTF document"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"SQLite format 3\x00", "an SQLite database"),
)
_MARKS = (  # the 32-bit marks first: the 16-bit ones are their beginnings
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_CHARSETS = {  # what a sender may declare, by the names of the IANA registry
    "utf-16": "utf-16-be", "utf-16le": "utf-16-le", "utf-16be": "utf-16-be",
    "utf-32": "utf-32-be", "utf-32le": "utf-32-le", "utf-32be": "utf-32-be",
    "big5": "big5", "euc-jp": "euc_jp", "euc-kr": "euc_kr", "gb18030": "gb18030", "gb2312": "gb18030",
    "gbk": "gb18030", "koi8-r": "koi8_r", "koi8-u": "koi8_u", "shift_jis": "shift_jis",
    **{f"iso-8859-{part}": f"iso8859_{part}" for part in (*range(1, 12), *range(13, 17))},
    **{f"windows-{page}": f"cp{page}" for page in range(1250, 1259)},
}  # fmt: skip
_TO_UTF8 = (
    "convert it to UTF-8 from the encoding that it is in; from WINDOWS-1252, say: "
    "iconv -f WINDOWS-1252 -t UTF-8 old.txt > new.txt"
)
_FROM_EBCDIC = "it looks like EBCDIC; convert it to UTF-8: iconv -f CP500 -t UTF-8 old.txt > new.txt"
_EBCDIC_COMMON = frozenset((string.ascii_letters + string.digits + " .,'-\r\n").encode("cp500"))


def _media_kind(filename: str | None, media_type: str | None) -> str:
    suffix = _path(filename).suffix.lower()
    declared = (media_type or "").split(";")[0].strip().lower()
    if suffix and suffix not in _SUFFIXES:
        raise UnsupportedMediaTypeError(
            f"files that end in {suffix[:20]!r} cannot be read", hint=f"accepted are {ACCEPTED}"
        )
    if declared not in _UNTOLD and declared not in _MEDIA_TYPES:
        raise UnsupportedMediaTypeError(
            f"documents of type {declared[:60]!r} cannot be read", hint=f"accepted are {ACCEPTED}"
        )
    return _SUFFIXES.get(suffix) or _MEDIA_TYPES.get(declared, PLAIN)


def _path(filename: str | None) -> PurePosixPath:
    return PurePosixPath((filename or "").replace("\\", "/"))


def _stem(filename: str | None) -> str:
    stem = _path(filename).stem
    printable = "".join(char if char.isprintable() else " " for char in stem)
    return " ".join(printable.replace("_", " ").split())


def _declared_charset(media_type: str | None) -> str:
    for parameter in (media_type or "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'").lower()
    return ""


def _refuse_signatures(data: bytes) -> None:
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            raise UnsupportedMediaTypeError(f"this is {kind}", hint=f"accepted are {ACCEPTED}")


def _refuse_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise PayloadTooLargeError(
            f"the document has more than {max_bytes:,} bytes",
            hint="split it, or raise ingest.max_document_bytes",
        )


def _decode(data: bytes, charset: str) -> tuple[str, str]:
    """The text, and a note where the decoding was anything but plain UTF-8."""
    for mark, codec in _MARKS:
        if data.startswith(mark):
            return _decode_as(data, codec), f"decoded as {codec.upper()} by its byte order mark"
    if charset in ("", "utf-8", "utf8", "us-ascii", "ascii") or data.startswith(b"\xef\xbb\xbf"):
        wide = _unmarked_utf16(data)
        if wide:
            text, codec = wide
            return text, f"decoded as {codec.upper()}: no byte order mark, but its zero bytes leave no doubt"
        return _decode_as(data, "utf-8"), ""
    if charset not in _CHARSETS:
        raise UnprocessableDocumentError(f"the declared charset {charset[:40]!r} is not known", hint=_TO_UTF8)
    return _decode_as(data, _CHARSETS[charset]), f"decoded as {charset}, as declared"


def _decode_as(data: bytes, codec: str) -> str:
    try:
        return data.decode(codec)
    except UnicodeDecodeError as error:
        raise UnprocessableDocumentError(
            f"the file is not {codec.upper()} text: byte {error.start:,} does not fit",
            hint=_FROM_EBCDIC if _is_ebcdic(data) else _TO_UTF8,
        ) from None


def _is_ebcdic(data: bytes) -> bool:
    """Whether nine of ten bytes are EBCDIC's commonest, blanks among them; only to word a hint."""
    sample = data[:4096]
    common = sum(byte in _EBCDIC_COMMON for byte in sample)
    return common * 10 >= len(sample) * 9 and sample.count(b"\x40") * 20 >= len(sample)


def _unmarked_utf16(data: bytes) -> tuple[str, str] | None:
    """UTF-16 without a mark, where zeros fill one side of the byte pairs and never the other.

    Of text in the other byte order about one pair in 256 would have its zero on this side, so that an
    eighth of all pairs, and three at least, cannot be chance.
    """
    if len(data) % 2 or b"\x00" not in data:
        return None
    first, second = data[0::2].count(0), data[1::2].count(0)
    codec = "utf-16-le" if second else "utf-16-be"
    if min(first, second) > 0 or max(first, second) < max(3, len(data) // 16):
        return None
    try:
        text = data.decode(codec)
    except UnicodeDecodeError:
        return None
    doubtful = any(char < " " and char not in "\t\n\r\f" for char in set(text))
    return None if doubtful else (text, codec)


def _accept(text: str, kind: str, notes: tuple[str, ...], title: str) -> SourceText:
    text, changes = _normalise(text)
    problem = _problem_with(text)
    if problem:
        raise UnprocessableDocumentError(
            f"the document {problem}", hint="remove it, or send the document as plain text"
        )
    if not has_visible_text(text):
        raise EmptyDocument("the document has no visible text", hint="send a document with text in it")
    if kind == MARKDOWN:
        title = _first_heading(text) or title
    return SourceText(text, kind, (*notes, *changes), title)


def _normalise(text: str) -> tuple[str, list[str]]:
    notes = []
    stripped = text.lstrip("\ufeff")
    if len(stripped) < len(text):
        notes.append("removed the byte order mark")
    returns = stripped.count("\r")
    if returns:
        stripped = stripped.replace("\r\n", "\n").replace("\r", "\n")
        notes.append("1 line end became LF" if returns == 1 else f"{returns:,} line ends became LF")
    replaced = stripped.count("\ufffd")
    if replaced:
        were = "character was" if replaced == 1 else "characters were"
        notes.append(f"{replaced:,} replacement {were} in it already: an earlier decoding lost text")
    return stripped, notes


def _problem_with(text: str) -> str:
    """What forbids this text, as the end of a sentence; empty where nothing does."""
    at = text.find("\x00")
    if at >= 0:
        return f"has a NUL character at {at:,}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a surrogate pair at {error.start:,}"
    return ""


def _is_invisible(char: str) -> bool:
    if char in _FILLERS or 0xFE00 <= ord(char) <= 0xFE0F or 0xE0100 <= ord(char) <= 0xE01EF:
        return True
    return unicodedata.category(char) in ("Cc", "Cf", "Cn", "Cs", "Zs", "Zl", "Zp")


def _first_heading(text: str) -> str:
    for line in text[:4000].split("\n"):
        if line.startswith("# "):
            return " ".join(line.strip("# \t").split())
    return ""
