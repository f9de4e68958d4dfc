"""One question's measures: what a policy's logits say against those of a full prefill, and of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the gold answer's tokens, each given those before it; nats.

    Attributes:
        kl: KL(full prefill || policy).
        dnll: negative log-likelihood of the gold tokens, the policy's less the full prefill's.
        agreement: share of tokens for which both have the same most likely one.
        right: whether greedy decoding begins with the gold answer.
        right_full: the same of the full prefill.
    """

    kl: float
    dnll: float
    nll_full: float
    agreement: float
    right: bool
    right_full: bool


def score(logits: Tensor, full: Tensor, gold: Sequence[int]) -> Score:
    """Of logits [n, vocab_size] behind the question and behind each gold token but the last."""
    ids = torch.as_tensor(gold, device=full.device)
    of_policy = torch.log_softmax(logits.to(full.device).double(), dim=-1)
    of_full = torch.log_softmax(full.double(), dim=-1)
    rows = torch.arange(len(gold), device=full.device)
    nll, nll_full = -of_policy[rows, ids], -of_full[rows, ids]
    kl = (of_full.exp() * (of_full - of_policy)).sum(dim=-1)
    best, best_full = of_policy.argmax(dim=-1), of_full.argmax(dim=-1)
    return Score(
        kl=float(kl.mean()),
        dnll=float((nll - nll_full).mean()),
        nll_full=float(nll_full.mean()),
        agreement=float((best == best_full).double().mean()),
        right=bool((best == ids).all()),
        right_full=bool((best_full == ids).all()),
    )


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 over words, articles and punctuation aside (Rajpurkar et al., SQuAD, 2016)."""
    return max(_f1(_words(answer), _words(gold)) for gold in golds)


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """The best F-measure of a longest common subsequence of words (Lin, ROUGE, 2004; beta = 1, unstemmed)."""
    found = _WORD.findall(answer.lower())
    return max(_rouge_l(found, _WORD.findall(gold.lower())) for gold in golds)


def _f1(found: list[str], gold: list[str]) -> float:
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold)) if common else 0.0


def _rouge_l(found: list[str], gold: list[str]) -> float:
    longest = [0] * (len(gold) + 1)  # [n]: of what was found so far and the first n gold words
    for word in found:
        before = longest
        longest = [0]
        for n, other in enumerate(gold):
            longest.append(before[n] + 1 if word == other else max(before[n + 1], longest[n]))
    return 2 * longest[-1] / (len(found) + len(gold)) if longest[-1] else 0.0


_WORD = re.compile(r"[^\W_]+")


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
