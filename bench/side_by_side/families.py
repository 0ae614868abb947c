"""Which module runs the engines of which project."""

from importlib import import_module
from typing import cast

from .engines import Family

MODULES = {
    "specstep": ".ours",
    "transformers": ".peer_transformers",
    "llama.cpp": ".peer_llama_cpp",
    "OpenVINO GenAI": ".peer_openvino",
}


def family(name: str) -> Family:
    """The module, imported only now: a peer's process must not hold another peer's libraries."""
    return cast(Family, import_module(MODULES[name], __package__))
