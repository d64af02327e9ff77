"""Where things lie, whatever folder a notebook or a command was started in.

JupyterLab starts a kernel in the notebook's folder, papermill in the caller's. A path such as
`data/tiny-qwen3_5` should mean the same in both. Does not know what lies at a path, and opens nothing.
"""

from __future__ import annotations

from pathlib import Path

from mtplab.checkpoint.hub import hub_hint, is_hub_name, resolve_hub
from mtplab.errors import ConfigError

__all__ = ["project_root", "resolve_path"]


def project_root(start: Path | None = None) -> Path | None:
    """The checkout around `start` (the current folder when None): the nearest with pyproject.toml and notebooks/."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "pyproject.toml").is_file() else None


def resolve_path(path: str | Path, must_exist: bool = True) -> Path:
    """`path` as it stands if it is absolute or exists here; otherwise below the root of the checkout.

    Args:
        path: file or folder; `~` is expanded. `hf://org/name` is that model's folder in the Hugging Face cache.
        must_exist: False for a folder that is to be made; it then lies below the checkout's root.

    Raises:
        ConfigError: nothing is there, neither here nor below the root.
        CheckpointError: a model on the hub that is not in the cache and cannot be fetched.
    """
    if is_hub_name(path):
        return resolve_hub(path)
    try:
        given = Path(path).expanduser()
    except RuntimeError:  # a ~ of nobody's
        raise ConfigError(f"{path}: no such user's folder; give the path without ~") from None
    if given.is_absolute() or given.exists():
        if must_exist and not given.exists():
            raise ConfigError(f"{given} does not exist; give the path of a checkpoint folder or a file")
        return given.resolve()
    root = project_root()
    if root is not None and (not must_exist or (root / given).exists()):
        return root / given
    if not must_exist:
        return given.resolve()
    tried = [str(Path.cwd() / given)] + ([str(root / given)] if root else [])
    raise ConfigError(f"{given} does not exist; looked for {' and '.join(tried)}.{hub_hint(given)}")
