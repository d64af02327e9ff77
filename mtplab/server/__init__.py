"""mtplab's own runner behind HTTP, in OpenAI's form: what drives serving engines can be tried on it, none installed.

A small study server, not one for production: one generation at a time, no streaming, no batching across requests, no
TLS. This room runs a loaded model on the requests it is given; it knows no points, sweeps, reports or other engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Listener", "Server", "serve"]

if TYPE_CHECKING:
    from mtplab.server.listener import Listener
    from mtplab.server.running import Server, serve


def __getattr__(name: str) -> Any:  # the command line binds its port before it loads torch
    if name == "Listener":
        from mtplab.server.listener import Listener

        return Listener
    if name in ("Server", "serve"):
        from mtplab.server import running

        return getattr(running, name)
    raise AttributeError(f"module 'mtplab.server' has no attribute {name!r}")
