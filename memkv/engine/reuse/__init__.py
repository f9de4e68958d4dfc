"""Policies of reuse, one to a file: which blocks of the mapped chunks are computed afresh for a question."""

from memkv.engine.reuse.exact import Exact
from memkv.engine.reuse.head import Head
from memkv.engine.reuse.map import Map
from memkv.engine.reuse.mass import Mass
from memkv.engine.reuse.parsing import parse_policy, policy_names
from memkv.engine.reuse.policy import BlockMass, LookRequest, MappedChunk, PolicyForm, ReusePolicy
from memkv.engine.reuse.select import Select

__all__ = [
    "BlockMass",
    "Exact",
    "Head",
    "LookRequest",
    "Map",
    "MappedChunk",
    "Mass",
    "PolicyForm",
    "ReusePolicy",
    "Select",
    "parse_policy",
    "policy_names",
]
