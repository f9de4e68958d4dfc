"""Looks at what a loaded model hands to its attention, and derives each layer's rotation and window.

Two passes over copies of one token, in which every row attends to itself alone. Then a layer's input is the
same in every row, whatever the position, and what differs between the keys of two rows is the rotation:

    key(p) = R(p) key(0)   for one of the model's own inv_freq sets, in one of the two pairings, or none
    value(p) = value(0)    or the model knows absolute positions in another way

The first pass stands at 0, 1, 2, ...; the second reaches to the end of the context, so that frequencies that
change with length show. The window is read from the mask that the model asks transformers for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from memkv.model.support import LayerSpec, RopeSpec, refusal

OBSERVER_NAME = "memkv_observer"

_NEAR = tuple(range(12))
_TOKEN = 7
# Settings of attention functions that are implemented, or that change nothing.
_KNOWN_SETTINGS = frozenset(
    {
        "sliding_window",
        "softcap",
        "position_ids",
        "use_cache",
        "is_causal",
        "cache_position",
        "position_embeddings",
    }
)
_LAST_WINDOW_PROBE = 1 << 18

# (batch, head, query position, key position) -> visible; transformers' form of a mask
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ObservedLayer:
    """What one layer showed: its spec, and the shape of its heads."""

    spec: LayerSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int


def observe(model: PreTrainedModel, max_context: int) -> list[ObservedLayer]:
    """Derives every layer's spec from two small passes; leaves the model set to the observer's attention.

    Raises:
        UnsupportedModel: a layer does something that paged attention over relocated keys would not reproduce.
    """
    model.set_attn_implementation(OBSERVER_NAME)
    if model.config._attn_implementation != OBSERVER_NAME:
        raise refusal(model.config, "its attention does not go through transformers' AttentionInterface")
    near = _run(model, _NEAR)
    far = _run(model, _far_positions(max_context))
    expected = list(range(model.config.num_hidden_layers))
    _refuse_structure(model, near, expected)
    rotations = _rotations(model)
    return [_observed(model, index, near, far, rotations, max_context) for index in expected]


@dataclass(slots=True)
class _Call:
    """One layer's arguments. query, key, value: [heads, rows, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    settings: Mapping[str, Any]


@dataclass(slots=True)
class _Pass:
    positions: tuple[int, ...]
    layers: dict[int, _Call] = field(default_factory=dict)
    masks: list[MaskFunction] = field(default_factory=list)
    calls: int = 0


_current: ContextVar[_Pass] = ContextVar("memkv_observed_pass")


def _observe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    index = int(module.layer_idx)  # type: ignore[arg-type]  # every transformers attention module has one
    call = _Call(query[0], key[0], value[0], attention_mask, settings)
    record = _current.get()
    record.layers[index] = call
    record.calls += 1
    # A row that sees itself alone gets its own value.
    repeats = query.shape[1] // value.shape[1]
    return value.repeat_interleave(repeats, dim=1).transpose(1, 2).contiguous(), None


def _tag_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: MaskFunction, **kwargs: Any
) -> Tensor:
    """A mask that carries its number, so that a layer's mask can be told from the tensor it receives."""
    masks = _current.get().masks
    masks.append(mask_function)
    return torch.full((batch_size, 1, q_length, kv_length), float(len(masks)), device=kwargs.get("device"))


AttentionInterface.register(OBSERVER_NAME, _observe_attention)
AttentionMaskInterface.register(OBSERVER_NAME, _tag_mask)


@contextmanager
def _recording(positions: tuple[int, ...]) -> Iterator[_Pass]:
    record = _Pass(positions)
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


@torch.inference_mode()
def _run(model: PreTrainedModel, positions: tuple[int, ...]) -> _Pass:
    device = next(model.parameters()).device
    with _recording(positions) as record:
        model.base_model(
            input_ids=torch.full((1, len(positions)), _TOKEN, device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
        )
    return record


def _far_positions(max_context: int) -> tuple[int, ...]:
    wanted = (0, 1, 17, 256, 1023, 4095, max_context // 2 + 1, max_context - 1)
    return tuple(sorted({position for position in wanted if 0 <= position < max_context}))


def _rotations(model: PreTrainedModel) -> list[RopeSpec]:
    """Every set of frequencies the model holds, in both directions and both pairings."""
    found: dict[tuple[float, ...], None] = {}
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1 and buffer.numel():
            inv_freq = buffer.double().cpu()
            found[tuple(inv_freq.tolist())] = None
            found[tuple((-inv_freq).tolist())] = None
    return [RopeSpec(inv_freq, interleaved) for inv_freq in found for interleaved in (False, True)]


def _refuse_structure(model: PreTrainedModel, record: _Pass, expected: list[int]) -> None:
    if sorted(record.layers) != expected:
        raise refusal(
            model.config,
            f"{len(record.layers)} of its {len(expected)} layers call attention; the others keep a state",
        )
    if record.calls != len(expected):
        raise refusal(
            model.config, "its layers are run more than once for a token, each time with other keys"
        )
    if any(type(module).__name__.endswith("Indexer") for module in model.modules()):
        raise refusal(model.config, "an indexer chooses which keys a token sees (sparse attention)")


def _observed(
    model: PreTrainedModel, index: int, near: _Pass, far: _Pass, rotations: list[RopeSpec], max_context: int
) -> ObservedLayer:
    call = near.layers[index]
    num_kv_heads, _, head_dim = call.key.shape
    if call.value.shape[-1] != head_dim or call.query.shape[-1] != head_dim:
        raise refusal(model.config, f"layer {index}: queries, keys and values of a head differ in size")
    if head_dim % 8:
        raise refusal(model.config, f"layer {index}: head dim {head_dim} is not a multiple of 8")
    _refuse_settings(model, index, call.settings)
    _refuse_drift(model, index, near, far)
    rope = _rope(model, index, near, far, rotations)
    softcap = float(call.settings.get("softcap") or 0.0)
    spec = LayerSpec("attention", _window(model, index, near, max_context), softcap, rope)
    return ObservedLayer(spec, call.query.shape[0], num_kv_heads, head_dim)


def _refuse_settings(model: PreTrainedModel, index: int, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name in ("scaling", "dropout", *_KNOWN_SETTINGS) or value is None or value is False:
            continue
        reason = "attention sinks" if name == "s_aux" else f"{name!r}"
        raise refusal(
            model.config, f"layer {index} hands {reason} to its attention, which memkv does not implement"
        )
    if settings.get("is_causal") is False:
        raise refusal(model.config, f"layer {index}: its attention is bidirectional")


def _refuse_drift(model: PreTrainedModel, index: int, near: _Pass, far: _Pass) -> None:
    first = near.layers[index].value[:, :1].double()
    allowed = _rounding(model.dtype) * float(first.abs().max())
    for record in (near, far):
        if float((record.layers[index].value.double() - first).abs().max()) > allowed:
            raise refusal(
                model.config,
                f"layer {index}: values depend on absolute position (learned or absolute embeddings)",
            )


def _rounding(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}.get(dtype, 2**-5)


def _rope(
    model: PreTrainedModel, index: int, near: _Pass, far: _Pass, rotations: list[RopeSpec]
) -> RopeSpec | None:
    excess = {candidate: _excess(model, index, near, far, candidate) for candidate in (None, *rotations)}
    best = min(excess, key=lambda candidate: excess[candidate])
    if excess[best] > 1.0:
        raise refusal(
            model.config,
            f"layer {index}: keys are not rotated by angles linear in position (best match is off by "
            f"{excess[best]:.1f} times what rounding allows)",
        )
    return best


def _excess(model: PreTrainedModel, index: int, near: _Pass, far: _Pass, candidate: RopeSpec | None) -> float:
    """How far the keys are from this rotation of key(0), in units of what rounding allows."""
    first = near.layers[index].key[:, :1].double()  # [kv_heads, 1, head_dim]
    scale = float(first.abs().max())
    if scale == 0.0 or (candidate is not None and 2 * len(candidate.inv_freq) > first.shape[-1]):
        return float("inf")
    worst = 0.0
    for record in (near, far):
        positions = torch.tensor(record.positions, dtype=torch.float64, device=first.device)
        expected = first if candidate is None else rotate(first, positions, candidate)
        error = (record.layers[index].key.double() - expected).abs().amax(dim=(0, 2)) / scale
        # The model computes angles in float32, so they are off in proportion to the position.
        allowed = _rounding(model.dtype) + positions * 2.0**-22
        worst = max(worst, float((error / allowed).max()))
    return worst


def rotate(x: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """Rotates the first rotary_dim dimensions of each head by positions * inv_freq.

    Args:
        x: [heads, rows or 1, head_dim].
        positions: [rows], any sign.

    Returns:
        [heads, rows, head_dim]
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64, device=x.device)
    angle = positions.double()[:, None] * inv_freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # [rows, rotary_dim / 2]
    half = inv_freq.numel()
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    first, second = a * cos - b * sin, a * sin + b * cos
    out = (
        torch.stack((first, second), dim=-1).flatten(-2)
        if rope.interleaved
        else torch.cat((first, second), dim=-1)
    )
    return torch.cat((out, rest.expand(*out.shape[:-1], -1)), dim=-1)


def _window(model: PreTrainedModel, index: int, near: _Pass, max_context: int) -> int:
    """A layer's window in memkv's sense (visible: key > query - window), from the mask that it was given."""
    call = near.layers[index]
    if call.mask is None:
        return int(call.settings.get("sliding_window") or 0)
    number = float(call.mask.flatten()[0])
    if number not in range(1, len(near.masks) + 1) or bool((call.mask != number).any()):
        raise refusal(model.config, f"layer {index}: it changes the attention mask in a way of its own")
    mask_function = near.masks[int(number) - 1]
    last = min(max_context, _LAST_WINDOW_PROBE) - 1
    window = last + 1 - _first_visible(model, index, mask_function, last)
    if window == last + 1:
        return 0
    for query in (last // 2 + window // 3, window - 1, window, window + 1):
        if _first_visible(model, index, mask_function, query) != max(0, query - window + 1):
            raise refusal(
                model.config, f"layer {index}: what a token sees is not a sliding window (chunked attention)"
            )
    return window


def _first_visible(model: PreTrainedModel, index: int, mask_function: MaskFunction, query: int) -> int:
    """The first key that `query` sees, when it sees a contiguous range that ends at itself."""
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(query + 2)
    try:
        visible = mask_function(zero, zero, torch.tensor(query), keys).expand(query + 2)
    except (IndexError, RuntimeError, TypeError) as error:
        raise refusal(model.config, f"layer {index}: its attention mask cannot be read ({error})") from error
    if bool(visible[query + 1]):
        raise refusal(model.config, f"layer {index}: its attention is bidirectional")
    first = query + 1 - int(visible.sum())
    if not bool(visible[first : query + 1].all()):
        raise refusal(model.config, f"layer {index}: its attention mask leaves holes")
    return first
