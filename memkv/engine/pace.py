"""How much of a longer work fits between two steps that somebody waits for."""

from __future__ import annotations

_FIRST_TOKENS = 256
_WEIGHT = 0.3  # of the newest measurement


class Pace:
    """Tokens a second, as measured, turned into a step of a wanted length.

    Args:
        least_tokens: of a step, however long they take: fewer are slower by the token, which would call for
            still fewer the next time.
    """

    def __init__(self, least_tokens: int = 128) -> None:
        self.least_tokens = least_tokens
        self.tokens_per_second = 0.0  # 0: not measured yet

    def observe(self, num_tokens: int, seconds: float) -> None:
        rate = num_tokens / max(seconds, 1e-6)
        if self.tokens_per_second:
            rate = _WEIGHT * rate + (1 - _WEIGHT) * self.tokens_per_second
        self.tokens_per_second = rate

    def tokens_for(self, seconds: float) -> int:
        """Tokens that take about so long, though never so few that they take longer by the token."""
        if not self.tokens_per_second:
            return _FIRST_TOKENS
        return max(self.least_tokens, int(self.tokens_per_second * seconds))
