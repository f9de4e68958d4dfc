"""The command line. A skin over the SDK: whatever it does, a program can do."""

from memkv.cli.root import main

__all__ = ["main"]
