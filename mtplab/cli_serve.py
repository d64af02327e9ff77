"""`mtplab serve`: a model behind HTTP until it is told to end.

Turns options into a server, says where it is, and ends it on a signal; knows nothing of requests.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from mtplab.cli_common import (
    CachePolicy,
    Calibration,
    CheckpointPath,
    Device,
    DraftCachePolicy,
    ModelFormat,
    exclusion,
    note,
    say,
    spinner,
)
from mtplab.errors import ConfigError, printable

if TYPE_CHECKING:
    from mtplab.server import Server

__all__ = ["serve"]

# seconds that a request may still have once the server is told to end
_GRACE = 1.0


def serve(
    path: CheckpointPath,
    depth: Annotated[int, typer.Option(metavar="N", help="Draft tokens per round, 0 (plain decoding) to 16.")] = 3,
    quant_policy: CachePolicy = "none",
    draft_quant_policy: DraftCachePolicy = None,
    calibration: Calibration = None,
    exclude: Annotated[
        str | None,
        typer.Option(
            metavar="SET",
            help="Modules kept out of FP8: as-stored, published, none, or globs with commas between. A BF16 checkpoint "
            "is quantised to FP8 as it is loaded for every set but as-stored.  [default: as-stored]",
        ),
    ] = None,
    draft_exclude: Annotated[
        str | None, typer.Option(metavar="SET", help="Likewise for the draft head; the same if left out.")
    ] = None,
    model_format: ModelFormat = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Of this machine; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What requests call the model.  [default: the folder's name]")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of requests that give none.")] = 0,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", " /--fast", help="Row-invariant arithmetic, or the fastest there is.")
    ] = True,
    device: Device = "cpu",
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Computed in: float32, bfloat16 or float16.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable that holds the key to ask for.")
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's completions, vLLM's metrics, mtplab's own runner.

    What drives serving engines can be tried on it with no other engine installed.

    A small study server: one generation at a time, no streaming. One line on stdout says when it is ready and where;
    Ctrl-C or SIGTERM ends it.

    \b
    Examples:
      mtplab serve data/tiny-qwen3_5 --port 0
      mtplab serve data/tiny-qwen3_5-fp8 --depth 5 --quant-policy int8 --port 0
      mtplab serve data/tiny-qwen3_5 --exclude 'mtp.*' --served-model-name study --port 0
    """
    key = _key(api_key_env)
    kept = exclusion("--exclude", *([] if exclude is None else [exclude]))
    draft_kept = exclusion("--draft-exclude", *([] if draft_exclude is None else [draft_exclude]))
    from mtplab.server import Listener

    with _told_to_end() as ending, Listener(host, port) as listener:
        from mtplab.checkpoint import open_checkpoint
        from mtplab.study.grid import exclusion_remark, weight_format
        from mtplab.study.prompts import calibration_ids

        opened = open_checkpoint(path)
        with spinner(f"loading {path}"):
            from mtplab.models import load_model

            model = load_model(
                opened,
                device=device,
                dtype=dtype,
                exclude=kept,
                draft_exclude=draft_kept,
                quant_policy=quant_policy,
                draft_quant_policy=draft_quant_policy,
                model_format=weight_format(opened, model_format, kept, draft_kept),
                exact=exact,
            )
            from mtplab.server.running import Server
            from mtplab.server.service import Service

            service = Service(
                model,
                depth,
                calibration=calibration_ids([quant_policy, draft_quant_policy], model.encode, calibration),
                seed=seed,
                name=_name(path) if served_model_name is None else served_model_name,
            )
        remark = exclusion_remark(model.checkpoint, model.plan, kept, draft_kept)
        if remark:
            note(remark)
        server = Server(service, listener, key)
        try:
            say(_ready(server))
            ending.armed.set()
            ending.wait()
        finally:
            answered = server.stop(_GRACE)
        if not answered:  # a pass that takes longer: nobody reads its end, and a thread in torch ends no process well
            sys.stdout.flush()
            os._exit(0)


def _ready(server: Server) -> str:
    """The one line: scripts wait for it, and read the address."""
    info = server.service.info()
    parts = [f"depth {info['depth']}", f"cache {info['quant_policy']}"]
    if info["draft_quant_policy"] not in (None, info["quant_policy"]):
        parts.append(f"draft's {info['draft_quant_policy']}")
    kept = info["exclude"] + ("" if info["draft_exclude"] == info["exclude"] else f", draft's {info['draft_exclude']}")
    parts += [f"exclusions {kept}", f"{info['dtype']} on {info['device']}", "exact" if info["exact"] else "not exact"]
    return f"serving {server.name} at {server.url} ({', '.join(parts)})"


def _name(path: Path) -> str:
    """The folder's name; of a model of the hub, its own, for the cache calls the folder by a hash."""
    return path.name.partition("@")[0] if str(path).startswith("hf:") else path.resolve().name


def _key(variable: str | None) -> str | None:
    """The key that the environment holds; never shown. Raises ConfigError where it holds none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip():
        found = "holds characters that no header carries" if key.strip() else "is not set, or empty"
        raise ConfigError(f"--api-key-env {printable(variable)!r:.80}: that variable {found}; put the key there")
    return key


class _Ending(threading.Event):
    """Set when the server is to end; `armed` from when it listens."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = threading.Event()


@contextmanager
def _told_to_end() -> Iterator[_Ending]:
    """SIGTERM and Ctrl-C as an event; while the model is still being loaded they end the process at once, as well."""
    ending = _Ending()

    def end(number: int, frame: FrameType | None) -> None:
        ending.set()
        if not ending.armed.is_set():
            raise SystemExit(0)

    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
