"""Networks and folders of photographs, above both adapters, and the command `drsa`.

In the order of the data flow: `settings` and `cli` (all settings with their defaults, and the command's
options made from them); `models` and `networks` (a network by name, with preprocessing and LRP rules),
`images` and `folders` (photographs, and the class that they show), `layers` (where concepts are found),
`wrappers` (which attribution method, and the explainer of its adapter); `session` and `steps` (what is
done), `work` (the folder of finished parts); `results`, `findings` and `report` (what it says); `auditing`
and `all_classes` (all of it in one call).

Names are loaded when they are used: the command can then say what is not installed, and starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auditing import Audit, audit
    from .images import load_images, photo_files
    from .networks import Network, load_network
    from .progress import BadInput
    from .settings import AuditSettings

_MODULES = {
    "auditing": ("Audit", "audit"),
    "images": ("load_images", "photo_files"),
    "networks": ("Network", "load_network"),
    "progress": ("BadInput",),
    "settings": ("AuditSettings",),
}

__all__ = [
    "Audit",
    "AuditSettings",
    "BadInput",
    "Network",
    "audit",
    "load_images",
    "load_network",
    "photo_files",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
