"""Stop texts: nothing of one is ever released, and nothing else is held back for good."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memkv.engine.answer_text import AnswerText


class Pieces:
    """A decoder that gives the pieces of a text, by index; the last one only when it is finished."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return self._rest


def released(pieces: list[str], stops: list[str], rest: str = "") -> tuple[list[str], bool]:
    answer = AnswerText(Pieces(pieces, rest), stops)
    texts = []
    for index in range(len(pieces)):
        texts.append(answer.push(index))
        if answer.stopped:
            return texts, True
    texts.append(answer.finish())
    return texts, answer.stopped


texts = st.text(alphabet="ab\n", max_size=4)


@given(st.lists(texts, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3), texts)
def test_the_answer_ends_before_the_first_stop_text(pieces: list[str], stops: list[str], rest: str) -> None:
    got, stopped = released(pieces, stops, rest)
    answer, whole = "".join(got), "".join(pieces) + rest
    assert whole.startswith(answer)
    assert not any(stop in answer for stop in stops)
    assert stopped == any(stop in whole for stop in stops)
    if stopped:
        assert any(whole.startswith(stop, len(answer)) for stop in stops)
    else:
        assert answer == whole


@given(st.lists(texts, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3))
def test_what_was_released_never_reaches_into_a_stop_text(pieces: list[str], stops: list[str]) -> None:
    """Whatever tokens follow: no end of what is out may be the head of a stop text."""
    answer = AnswerText(Pieces(pieces), stops)
    out = ""
    for index in range(len(pieces)):
        out += answer.push(index)
        if answer.stopped:
            break
        held = "".join(pieces[: index + 1])[len(out) :]
        for stop in stops:
            for length in range(1, len(stop)):
                assert not (out.endswith(stop[:length]) and (out + held).endswith(stop[:length]) and not held)


def test_text_is_released_as_soon_as_no_stop_text_can_begin_in_it() -> None:
    got, stopped = released(["The ", "answer\n", "Que", "ry\nQuest", "ion: x"], ["\nQuestion:"])
    assert got == ["The ", "answer", "", "\nQuery", ""]
    assert stopped


def test_a_stop_text_within_one_token_cuts_it() -> None:
    assert released(["one. two", "three"], [". "]) == (["one"], True)


def test_what_was_held_comes_out_at_the_end() -> None:
    assert released(["ab", "a"], ["aa", "abc"]) == (["", "ab", "a"], False)


def test_a_stop_text_that_only_the_last_bytes_complete_counts() -> None:
    assert released(["x", "a"], ["ab"], rest="b") == (["x", "", ""], True)


def test_without_a_decoder_there_is_no_text() -> None:
    answer = AnswerText(None, [])
    assert (answer.push(1), answer.finish()) == ("", "")
