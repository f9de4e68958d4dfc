"""The routes, one file per noun."""

from memkv.api.controllers.collections import CollectionsController
from memkv.api.controllers.documents import DocumentsController
from memkv.api.controllers.jobs import JobsController
from memkv.api.controllers.keys import KeysController
from memkv.api.controllers.probes import ProbesController
from memkv.api.controllers.queries import QueriesController
from memkv.api.controllers.service import ServiceController
from memkv.api.controllers.store import StoreController

CONTROLLERS = (
    ProbesController,
    ServiceController,
    CollectionsController,
    DocumentsController,
    JobsController,
    QueriesController,
    StoreController,
    KeysController,
)

__all__ = ["CONTROLLERS"]
