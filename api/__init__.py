"""The HTTP server: a Litestar application over a `Memory`, and how it is run."""

from memkv.api.app import create_app
from memkv.api.serve import listen, serve

__all__ = ["create_app", "listen", "serve"]
