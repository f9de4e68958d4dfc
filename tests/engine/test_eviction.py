"""EvictionOrder, against a model that sorts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memkv.engine.eviction import EvictionOrder, worth


@settings(deadline=None, max_examples=200)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 8), st.integers(0, 3)),
        max_size=300,
    )
)
def test_the_least_priority_goes_first_and_of_equals_the_oldest(actions: list[tuple[str, int, int]]) -> None:
    order: EvictionOrder[int] = EvictionOrder()
    model: dict[int, tuple[float, int]] = {}
    clock = 0.0
    for number, (action, item, value) in enumerate(actions):
        if action == "add" and item not in model:
            order.add(item, value)
            model[item] = (clock + value, number)
        elif action == "discard":
            assert order.discard(item) == (model.pop(item, None) is not None)
        elif action == "pop" and model:
            expected = min(model, key=lambda key: model[key])
            clock = model.pop(expected)[0]
            assert order.pop() == expected
        assert set(order) == set(model) and len(order) == len(model)
        assert len(order._heap) <= 2 * len(model) + 65


def test_what_was_used_often_but_long_ago_goes_in_the_end() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    order.add("old", worth(10, 32, 0, 2))
    order.add("other", worth(1, 32, 0, 2))
    for number in range(100):
        order.add(f"new {number}", worth(1, 32, 0, 2))
        if order.pop() == "old":
            break
    else:
        raise AssertionError("it stayed for ever")
    assert number > 5


def test_worth_counts_uses_tokens_and_blocks() -> None:
    assert worth(2, 32, 0, 2) == 2 * worth(1, 32, 0, 2)
    assert worth(1, 17, 0, 2) < worth(1, 32, 0, 2)  # a block that is not full
    assert worth(1, 32, 8000, 2) > worth(1, 32, 0, 2)  # it attends to more
