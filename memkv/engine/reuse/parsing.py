"""Policies by their names. Each module of this package that has a `FORM` is a policy; nothing lists them."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from memkv.engine.reuse.policy import PolicyForm, ReusePolicy
from memkv.errors import BadRequestError


def policy_names() -> list[str]:
    """How each policy is written, such as "head:n"."""
    return [form.pattern for form in _FORMS.values()]


def parse_policy(text: str) -> ReusePolicy:
    """The policy that a text such as `exact`, `head` or `head:2` names. Raises `BadRequestError`."""
    name, colon, parameter = text.partition(":")
    form = _FORMS.get(name)
    policy = None if form is None else form.parse(parameter if colon else None)
    if policy is None:
        raise BadRequestError(
            f"unknown reuse policy {text!r}",
            hint=f"{', '.join(policy_names())}; n counts from 1, r and p are above 0 and at most 1",
        )
    return policy


def _find_forms() -> dict[str, PolicyForm]:
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    forms = [module.FORM for module in modules if hasattr(module, "FORM")]
    return {form.name: form for form in forms}


_FORMS = _find_forms()
