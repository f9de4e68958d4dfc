"""Which policy answers: the one asked for, or the cheapest whose loss was measured and is small enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memkv.config import QueryConfig
from memkv.engine.reuse import Exact, ReusePolicy, parse_policy
from memkv.errors import BadRequestError
from memkv.store.rows import GateRow

_CAN_DO = 0.7  # tasks that a full prefill answers less often say nothing


@dataclass(frozen=True, slots=True)
class ChosenPolicy:
    policy: ReusePolicy
    fallback_reason: str = ""


def named_policy(name: str) -> ReusePolicy | None:
    """The policy of a name; None for `auto`. Raises `BadRequestError`."""
    return None if name == "auto" else parse_policy(name)


def cheapest_that_passed(
    gates: Sequence[GateRow], config: QueryConfig, *, chunk_tokens: int, mapped_tokens: int = 0
) -> ChosenPolicy:
    """Of the approximations that were measured, the cheapest that passes; `exact` and why where none does.

    A policy passes if on every kind of tasks that was measured, with at least `gate_questions` questions, it
    adds at most `gate_dnll` nats a token to the gold answer, at the upper end of the interval. Kinds that the
    model cannot do with a full prefill are left out. What was measured of larger chunks or shorter prompts
    says nothing: the more chunks there are, and the smaller, the more reuse costs.

    Args:
        chunk_tokens: of the largest chunk that the collection may have.
        mapped_tokens: of all chunks in the prompt.
    """
    if not gates:
        reason = "no quality gate has been measured for this model and prefix, so auto means exact"
        return ChosenPolicy(Exact(), reason)
    gates = [row for row in gates if row.chunk_tokens <= chunk_tokens and row.length >= mapped_tokens]
    if not gates:
        reason = "the quality gate was measured of larger chunks, or fewer, so auto means exact"
        return ChosenPolicy(Exact(), reason)
    can_do = [row for row in gates if row.accuracy_full >= _CAN_DO]
    kinds = {(row.data, row.kind) for row in can_do}
    by_policy: dict[str, list[GateRow]] = defaultdict(list)
    for row in can_do:
        by_policy[row.policy].append(row)
    whole = [
        (max(row.fresh for row in rows), name, rows)
        for name, rows in by_policy.items()
        if {(row.data, row.kind) for row in rows} == kinds and _approximation(name)
    ]
    for _, name, rows in sorted(whole, key=lambda each: each[:2]):
        if all(row.questions >= config.gate_questions and row.dnll_high <= config.gate_dnll for row in rows):
            return ChosenPolicy(parse_policy(name))
    close = f"keeps within {config.gate_dnll:g} nats a token"
    if any(all(row.dnll_high <= config.gate_dnll for row in rows) for _, _, rows in whole):
        close += f" on at least {config.gate_questions} questions of each kind"
    return ChosenPolicy(
        Exact(), f"no approximation that was measured for this model {close}, so auto means exact"
    )


def _approximation(name: str) -> bool:
    """Whether it is a policy of this memkv, no peer, that computes less than `exact` does."""
    try:
        policy = parse_policy(name)
    except BadRequestError:
        return False
    return not isinstance(policy, Exact) and not policy.reorders
