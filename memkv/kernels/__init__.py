"""Paged attention and KV writes: `ops` runs them, `reference` says what they mean."""

from memkv.kernels.plan import AttentionPlan, AttentionResult, Rotation

__all__ = ["AttentionPlan", "AttentionResult", "Rotation"]
