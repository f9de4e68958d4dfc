"""Which collections another model made, told from files alone: no model is loaded for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memkv.config import Config
from memkv.kv.fingerprint import FORMAT_VERSION, NUMERICS, POSITION_POLICY, Fingerprint, token_digest
from memkv.memory.collections import template_of
from memkv.memory.parts import choose_device, models_dir
from memkv.model.install import resolve
from memkv.model.loader import ModelIdentity, identify_model
from memkv.store.rows import CollectionRow
from memkv.text.embedder import embedder_digest
from memkv.text.tokenizer import TextTokenizer


def stale_collections(config: Config, collections: Sequence[CollectionRow]) -> dict[str, list[str]]:
    """Name -> what of its fingerprint the configured model does not have; only those where something differs.

    Weights, configuration, tokenizer, prefix, dtypes and embedder are compared. What only a loaded model
    shows (its effective rotation and layers) follows from those, but for another version of transformers.

    Raises:
        ModelNotFound, ModelDamaged, UnsupportedModel: the model or the embedder cannot be read.
    """
    if not collections:
        return {}
    identity = identify_model(config.model.model, models_dir(config))
    digest = embedder_digest(resolve(config.model.embedder, models_dir(config)))
    tokenizer = TextTokenizer(identity.tokenizer)
    found = {row.name: _differences(config, row, identity, tokenizer, digest) for row in collections}
    return {name: differences for name, differences in found.items() if differences}


def _differences(
    config: Config, row: CollectionRow, identity: ModelIdentity, tokenizer: TextTokenizer, embedder: str
) -> list[str]:
    first = config.model.device.split(",")[0].strip()  # all of a list compute alike
    prefix = template_of(tokenizer, row.system_prompt, row.primer).prefix_ids
    stored = Fingerprint.from_json(row.fingerprint_json)
    here = replace(
        stored,
        weights_digest=identity.weights_digest,
        tokenizer_digest=identity.tokenizer_digest,
        kv_dtype=config.kv.dtype,
        compute_dtype=choose_device(replace(config, model=replace(config.model, device=first)))[1],
        prefix_digest=token_digest((), prefix).hex(),
        position_policy=POSITION_POLICY,
        numerics=NUMERICS,
        format_version=FORMAT_VERSION,
    )
    other = [] if row.embedder_digest == embedder else ["embedder"]
    return here.differences(stored) + other
