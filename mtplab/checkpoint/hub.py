"""A checkpoint named on the Hugging Face hub, `hf://org/name[@revision]`, as a folder of this machine.

What the hub's own cache has is used as it is, without the network. What it lacks is fetched only because a name that
begins with `hf://` asks for it, and only where huggingface_hub is installed. Knows nothing of what is in the folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError, ConfigError

__all__ = ["PREFIX", "hub_hint", "is_hub_name", "resolve_hub"]

PREFIX = "hf://"
# what a run reads: no pickles, no code, no copies in other formats
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"hf:/+({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?/?")
_BARE = re.compile(rf"{_PART}/{_PART}")


def is_hub_name(path: object) -> bool:
    """Whether a path is a name on the hub: `hf://…`, or `hf:/…` as pathlib writes that."""
    return str(path).startswith("hf:/")


def hub_hint(path: object) -> str:
    """What to try where nothing is at `path`: the rest of a message, empty where it can be no name on the hub."""
    name = str(path)
    return f" For the model of that name on the Hugging Face hub write {PREFIX}{name}." if _BARE.fullmatch(name) else ""


def resolve_hub(path: object) -> Path:
    """The folder with the files of `hf://org/name[@revision]`, a branch, tag or commit; main if none is given.

    The cache is that of huggingface_hub: HF_HUB_CACHE, or HF_HOME's `hub`, or `~/.cache/huggingface/hub`. A snapshot
    that lacks shards of its index is completed like one that is missing: not with HF_HUB_OFFLINE set. Raises
    ConfigError for a name of another form, CheckpointError where the files are not here and cannot be fetched.
    """
    found = _NAME.fullmatch(str(path))
    if found is None or ".." in str(path):
        raise ConfigError(f"{shown(str(path))}: expected hf://organisation/name, with @revision after it if need be.")
    name, revision = found[1], found[2] or "main"
    cache = _cache()
    folder = _snapshot(cache / f"models--{name.replace('/', '--')}", revision)
    if folder is not None and not _missing(folder):
        return folder
    return _fetch(name, revision, cache, folder)


def _cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return _expanded(given)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return _expanded(home) / "hub"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # a ~ of nobody's
        raise ConfigError(f"{shown(path)}: no such user's folder; set HF_HUB_CACHE to the path of the cache.") from None


def _snapshot(repository: Path, revision: str) -> Path | None:
    """The folder of a revision in the cache: `refs/<branch or tag>` holds a commit, `snapshots/<commit>` its files."""
    try:
        commit = (repository / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return None
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None


def _missing(folder: Path) -> list[str]:
    """Files that a snapshot should have and has not: a download that was broken off leaves such folders."""
    from mtplab.checkpoint.strict_json import read_json_object

    names = {path.name for path in folder.iterdir() if path.exists()}  # links into blobs that are gone are not there
    wanted = {"config.json"}
    if "model.safetensors.index.json" in names:
        weights = read_json_object(folder / "model.safetensors.index.json", "a safetensors index").get("weight_map")
        wanted |= {str(shard) for shard in weights.values()} if isinstance(weights, dict) else set()
    elif not any(name.endswith(".safetensors") for name in names):
        wanted.add("model.safetensors")
    return sorted(wanted - names)


def _fetch(name: str, revision: str, cache: Path, partial: Path | None) -> Path:
    """Files of a revision from the hub, into its cache."""
    state = f"{cache} has no snapshot of it"
    if partial is not None:
        state = f"{partial} lacks {', '.join(_missing(partial)[:3])}"
    where = f"{PREFIX}{name}" + ("" if revision == "main" else f"@{revision}")
    elsewhere = f"Or download it where there is a network (`hf download {name}`), copy the folder here, give its path."
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{where}: {state}, and fetching it needs huggingface_hub: pip install 'mtplab[hub]'. {elsewhere}"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(PATTERNS)))
    except Exception as error:  # its own, those of whichever HTTP library it uses, and of the network
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{where}: {state}, and the hub gave none ({type(error).__name__}: {reason}). Check the name, and for a "
            f"gated model HF_TOKEN. {elsewhere}"
        ) from None
