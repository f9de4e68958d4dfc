"""Integers and bytes of the KV memory: no torch, no IO."""
