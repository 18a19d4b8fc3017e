"""Networks and folders of photographs, above both adapters, and the command `drsa`.

In the order of the data flow: `networks` (a network by name, with preprocessing and rules; `weights` says
where models come from, `published` how photographs become inputs), `images` (folders of photographs;
`package_photos` has those that come with packages), `backends` (LRP, Gradient × Input, Integrated Gradients,
Shapley values behind one interface).

The paper's tables are made by `examples/study/benchmark.py`, which is not installed.

For an audit: `opening` and `folders` (model, class and files from what a user names), `layers` and
`backend_choice` (where and how to explain), `session`, `concepts`, `audit_steps` and `explaining` (what is
done), `work` (what is kept), `findings`, `record` and `report` (what it says), `auditing`, `fitting` and
`many` (all of it in one call), `command`.

Names are loaded when they are used: the command can then say what is not installed, and starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auditing import Audit, AuditSettings, audit
    from .backends import Backend, make_backend, relevance_at
    from .errors import BadInput
    from .images import ClassImages, class_folders, find_classes, load_images, photo_files
    from .networks import Network, load_network, with_upper_gamma

_PLACES = {
    "auditing": ("Audit", "AuditSettings", "audit"),
    "backends": ("Backend", "make_backend", "relevance_at"),
    "errors": ("BadInput",),
    "images": ("ClassImages", "class_folders", "find_classes", "load_images", "photo_files"),
    "networks": ("Network", "load_network", "with_upper_gamma"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Audit",
    "AuditSettings",
    "Backend",
    "BadInput",
    "ClassImages",
    "Network",
    "audit",
    "class_folders",
    "find_classes",
    "load_images",
    "load_network",
    "make_backend",
    "photo_files",
    "relevance_at",
    "with_upper_gamma",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
