"""What a sweep is asked for beside its grid, checked before anything runs.

Knows nothing of points, files or models; the grid's own axes are checked where it is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mtplab.errors import ConfigError

__all__ = ["check_hooks", "judges", "method_of", "opened"]


def check_hooks(hooks: dict[str, Any], cancel: Any, executor: Any) -> None:
    """Refuse what would fail only once a row is there, or as every row's error."""
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise ConfigError(f"{name} is {hook!r:.60}; expected something to call, or None")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise ConfigError(f"cancel is {cancel!r:.60}; expected a threading.Event, or None")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ConfigError(
            f"executor is {executor!r:.60}; expected a concurrent.futures.Executor, such as ProcessPoolExecutor(4), or "
            "None to run here"
        )


def method_of(method: Any, generate: Any, depths: tuple[int, ...]) -> Literal["run", "trace"]:
    """How rows are made where nobody, or somebody, says so."""
    if method not in (None, "trace", "run"):
        raise ConfigError(f"method is {method!r:.60}; expected 'trace', 'run', or None to leave it open")
    if method == "trace" and generate is not None:
        raise ConfigError(
            "method is 'trace' and a generate is given, which a trace does not call: leave one of them out"
        )
    return method or ("run" if generate is not None or depths == (0,) else "trace")


def opened(model_or_path: Any, what: str = "first argument") -> tuple[Any, Any]:
    """(checkpoint, loaded model or None) from a path, a checkpoint or a model."""
    if isinstance(model_or_path, str | Path):
        from mtplab.checkpoint import open_checkpoint

        return open_checkpoint(model_or_path), None
    if hasattr(model_or_path, "checkpoint"):
        return model_or_path.checkpoint, model_or_path
    if hasattr(model_or_path, "tensors"):
        return model_or_path, None
    raise ConfigError(
        f"the {what} is a {type(model_or_path).__name__}; expected a checkpoint's folder, an open "
        "checkpoint or a loaded model"
    )


def judges(quality: Any, reference: Any, hook: Any) -> bool:
    """Whether targets are judged, where nobody, or somebody, says so; a hook may give what is no model at all."""
    if quality not in (None, True, False) or (quality is False and reference is not None):
        given = " and a reference is given" if reference is not None else ""
        raise ConfigError(
            f"quality is {quality!r:.60}{given}; expected True, False without a reference, or None to leave it open"
        )
    return (reference is not None or hook is None) if quality is None else bool(quality)
