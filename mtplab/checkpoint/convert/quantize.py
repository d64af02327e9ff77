"""One checkpoint written as another: BF16 to FP8, FP8 to BF16, FP8 in another layout or with more kept out of it.

Ties this folder's modules together: what becomes of each tensor is decided in `decide.py`, moved in `engine.py`, and
kept track of in `state.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.checkpoint import Checkpoint, Plan, SafetensorsWriter, open_checkpoint
from mtplab.checkpoint.config_json import BESIDE_FILES, CONFIG_FILE, SEPARATE_FILE, with_quantization
from mtplab.checkpoint.convert.amend import amended
from mtplab.checkpoint.convert.decide import Decision, Wish, decide
from mtplab.checkpoint.convert.engine import Pool, pool, write_shard
from mtplab.checkpoint.convert.files import copy_beside
from mtplab.checkpoint.convert.layouts import layouts, recipe_of
from mtplab.checkpoint.convert.pieces import Piece
from mtplab.checkpoint.convert.rows import Shard
from mtplab.checkpoint.convert.state import Partial, check_free, identity, write_json
from mtplab.checkpoint.exclusions import parse_exclude
from mtplab.checkpoint.index import INDEX_NAME
from mtplab.checkpoint.lenses import look, views_of
from mtplab.checkpoint.strict_json import read_json_object, shown
from mtplab.errors import CheckpointError, ConfigError

__all__ = ["FORMATS", "Written", "quantize_checkpoint"]

FORMATS = ("fp8-block", "fp8-channel", "fp8-tensor", "bf16")


@dataclass(frozen=True)
class Written:
    """What was written, and what was not.

    Attributes:
        path: the folder.
        plan: of the checkpoint written, as mtplab reads it back.
        actions: what became of tensors ("copied", "carried over", "to FP8", "to BF16") → how many.
        left: tensor of the source → why nothing was written of it. Scales that went into values are not among them.
        kept: modules that are listed as kept out of FP8, by full name.
        files_left: files of the source folder that were not copied.
        engines: one sentence on which engines read its exclusion list as it is meant; empty where nothing is FP8.
        warnings: sentences on what may not be what was wanted.
        resumed: shards taken from an earlier, stopped run.
        nbytes: bytes of the tensors written, without headers.
    """

    path: Path
    plan: Plan
    actions: dict[str, int]
    left: dict[str, str]
    kept: tuple[str, ...]
    files_left: tuple[str, ...]
    engines: str
    warnings: tuple[str, ...]
    resumed: int
    nbytes: int


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    exclude: str | Sequence[str] | None = None,
    draft_exclude: str | Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    format: str | None = None,
    layout: str | None = None,
    scales: str = "float",
    block: tuple[int, int] | None = None,
    draft: str = "like-target",
    restart: bool = False,
    threads: int | None = None,
) -> Written:
    """Write the checkpoint `src` anew to the folder `dst`, in FP8 or in BF16, a band of rows at a time.

    Args:
        src: any checkpoint that `open_checkpoint` reads. Its shards keep their names.
        dst: a folder that does not exist yet. It appears whole, flushed to disk, or not at all; a run that was stopped
            goes on where it stood when it is called again with the same settings.
        exclude, draft_exclude: as in `Checkpoint.plan`, of which a plain source's is followed: None is what releases
            keep (`exclusions.PUBLISHED`: `mtp.fc` and routers among it). For an FP8 source None is what it keeps; names
            are dequantised to BF16 and come on top of that; "none" quantises it too. What no run of the text model
            loads stays as it is (a vision tower).
        progress: called with (bytes of the source converted, bytes in all).
        format: "fp8-block", "fp8-channel", "fp8-tensor" (the values that share a scale) or "bf16". None: "fp8-block"
            for a plain source; an FP8 one stays in the layout it has.
        layout: "hf" (the default), "compressed-tensors" or "modelopt".
        scales: "float", amax / 448, or "ue8m0", the power of two above. Either is stored as float32.
        block: (rows, columns) of "fp8-block"; (128, 128) if None.
        draft: what becomes of the draft head. "like-target"; "keep": as it is stored; "quantize": also what an FP8
            source has unquantised; "bf16": its FP8 is dequantised.
        restart: discard what a stopped run left.
        threads: how many convert; the machine's cores, at most 8, if None.

    Codes and scales that are already what is asked for are carried over bit for bit.

    Raises CheckpointError for a source that cannot be read or holds NaN or infinity in what is to be quantised, and for
    a destination that cannot be written; ConfigError for a destination that exists, a pattern that covers no module,
    settings that do not go together, and a stopped run with other settings.
    """
    source = open_checkpoint(src)
    wish = _wish(source, format, layout, scales, block, exclude, draft_exclude, draft)
    target = _target(dst)
    decision = decide(source, wish)
    configs = _configs(source, wish, decision)
    settings = {
        "format": format, "layout": layout, "scales": scales, "block": block,
        "exclude": _sorted(parse_exclude(exclude)), "draft_exclude": _sorted(parse_exclude(draft_exclude)),
        "draft": draft, "kept": decision.kept,
    }  # fmt: skip
    origin = identity(source)
    try:
        with Partial(target).opened(settings, origin, restart) as partial:
            resumed, nbytes = _write_shards(source, wish, decision, partial, progress, threads)
            files_left = _copied(source, partial.content)
            for name, content in configs.items():
                write_json(partial.content / name, content)
            made = open_checkpoint(partial.content)
            plan = made.plan()
            engines = _engines(made, plan)
            _check_unchanged(source, origin)
            partial.publish()
        if plan.warnings:  # which name files
            plan = open_checkpoint(target).plan()
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}.") from None
    actions: dict[str, int] = {}
    for piece in decision.pieces.pieces:
        actions[piece.action] = actions.get(piece.action, 0) + 1
    return Written(
        target, plan, actions, dict(decision.pieces.left), tuple(decision.kept), tuple(files_left), engines,
        tuple(decision.warnings), resumed, nbytes,
    )  # fmt: skip


def _copied(source: Checkpoint, content: Path) -> list[str]:
    """What lies beside the weights and was left. Beside a single file without a config it is anyone's: none of it."""
    return copy_beside(source.files.folder, content, set(source.files.shards)) if source.config else []


def _target(dst: str | os.PathLike[str]) -> Path:
    """Where to write. Raises ConfigError for what is there already or names no place, CheckpointError for no access."""
    try:
        target = Path(dst)
        check_free(target)
    except ConfigError:
        raise
    except (TypeError, ValueError):  # a NUL, say
        raise ConfigError(f"{shown(dst)}: expected the path of a folder that does not exist yet.") from None
    except OSError as error:
        raise CheckpointError(f"{shown(dst)}: cannot be written: {error.strerror}.") from None
    return target


def _check_unchanged(source: Checkpoint, origin: dict[str, Any]) -> None:
    """Raises CheckpointError where the source is not any more what was read: what was written is of two."""
    advice = "The same command with --restart starts over."
    try:
        again = open_checkpoint(source.path)
        now = identity(again)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path} changed while it was converted: {error} {advice}") from None
    differing = [name for name in dict.fromkeys([*origin, *now]) if origin.get(name) != now.get(name)]
    if not differing and dict(again.tensors) != dict(source.tensors):
        differing = ["its headers"]
    if differing:
        raise CheckpointError(
            f"{source.path} changed while it was converted ({', '.join(map(shown, differing[:4]))}): expected it to "
            f"stay as it was; what was written is part old, part new, and is not published. {advice}"
        )


def _sorted(items: tuple[str, ...] | None) -> list[str] | None:
    """In an order of its own: a set has none that lasts from run to run."""
    return None if items is None else sorted(items)


def _engines(made: Checkpoint, plan: Plan) -> str:
    if made.quantization is None or made.found is None:
        return ""
    return look(views_of(plan.modules), made.quantization.method, made.found.content, made.config).sentence


def _wish(
    source: Checkpoint, format: str | None, layout: str | None, scales: str, block: tuple[int, int] | None,
    exclude: Any, draft_exclude: Any, draft: str,
) -> Wish:  # fmt: skip
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format={format!r}: expected one of {', '.join(FORMATS)}.")
    plain = source.quantization is None
    if format == "bf16" or (format is None and not plain):
        if layout is not None or scales != "float" or block is not None:
            raise ConfigError(
                "layout, scales and block say how FP8 is written: expected them with a format fp8-block, fp8-channel "
                "or fp8-tensor."
            )
        if plain:
            raise CheckpointError(
                f"{source.path}: expected an FP8 checkpoint to dequantise, found one that is not quantised."
            )
        return Wish(None, format == "bf16", exclude, draft_exclude, draft)
    recipe = recipe_of(format or "fp8-block", layout or "hf", scales, block)
    return Wish(recipe, False, exclude, draft_exclude, draft)


def _configs(source: Checkpoint, wish: Wish, decision: Decision) -> dict[str, dict[str, Any]]:
    """The configs to write, by file name."""
    if wish.all_bf16:
        return {CONFIG_FILE: with_quantization(source.config, None)}
    if wish.recipe is not None:
        layout = layouts()[wish.recipe.layout]
        made = {CONFIG_FILE: with_quantization(source.config, layout.config(wish.recipe, decision.kept))}
        if layout.separate is not None:
            made[SEPARATE_FILE] = layout.separate(wish.recipe, decision.kept)
        return made
    assert source.found is not None and source.quantization is not None
    made = {CONFIG_FILE: source.config}
    if with_quantization(source.config, None) != source.config:
        made[CONFIG_FILE] = with_quantization(source.config, amended(source.found.content, decision.to_bf16))
    for name in BESIDE_FILES:
        if (path := source.files.folder / name).exists():
            content = read_json_object(path, "a quantisation config")
            said = amended({"quant_method": source.quantization.method, **content}, decision.to_bf16)
            made[name] = {key: value for key, value in said.items() if key in content or key != "quant_method"}
    return made


def _write_shards(
    source: Checkpoint, wish: Wish, decision: Decision, partial: Partial,
    progress: Callable[[int, int], None] | None, threads: int | None,
) -> tuple[int, int]:  # fmt: skip
    """(shards taken over from a stopped run, bytes of tensors written in all)."""
    by_shard: dict[Path, list[Piece]] = {shard: [] for shard in source.files.shards}
    for piece in decision.pieces.pieces:
        by_shard[piece.source.file].append(piece)
    writers: dict[str, tuple[SafetensorsWriter, list[Piece]]] = {}
    weight_map: dict[str, str] = {}
    for shard, pieces in by_shard.items():
        outputs = {output.name: (output.dtype, output.shape) for piece in pieces for output in piece.outputs}
        if not outputs:
            continue  # nothing of it is written: scales alone, say
        name = shard.relative_to(source.files.folder).as_posix()
        weight_map |= dict.fromkeys(outputs, name)
        # "format" is what transformers asks of a file it loads
        metadata = {"format": "pt"} | (source.files.metadata.get(shard, {}) if _keeps_metadata(wish) else {})
        # in the order of their bytes, which is how they are read fastest
        writers[name] = (
            SafetensorsWriter(partial.content / name, outputs, metadata),
            sorted(pieces, key=lambda piece: piece.source.start),
        )
    todo = {name: found for name, found in writers.items() if not partial.is_done(name, found[0].size, found[0].header)}
    _check_space(partial.folder, sum(writer.size for writer, _ in todo.values()), partial.target)
    count = _Count(progress, sum(piece.source.nbytes for _, pieces in writers.values() for piece in pieces))
    count.add(sum(p.source.nbytes for name, (_, pieces) in writers.items() if name not in todo for p in pieces))
    power_of_two = wish.recipe is not None and wish.recipe.scales == "ue8m0"
    with pool(threads) as workers, ThreadPoolExecutor(1, "flush") as flusher:
        flushing: Future[None] | None = None
        for name, (writer, pieces) in todo.items():
            (partial.content / name).parent.mkdir(parents=True, exist_ok=True)
            finish = _fill(writer, pieces, workers, power_of_two, count.add)
            # a shard is flushed while the next one is converted
            if flushing is not None:
                flushing.result()
            flushing = flusher.submit(_finish, finish, partial, name, writer)
        if flushing is not None:
            flushing.result()
    size = sum(output.nbytes for piece in decision.pieces.pieces for output in piece.outputs)
    if source.files.index is not None or len(source.files.shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(partial.content / INDEX_NAME, index)
    return len(writers) - len(todo), size


def _keeps_metadata(wish: Wish) -> bool:
    """torchao's readers need what is said there; nothing else does."""
    return wish.recipe is None and not wish.all_bf16


def _fill(
    writer: SafetensorsWriter, pieces: Iterable[Piece], workers: Pool, power_of_two: bool, done: Callable[[int], None]
) -> ExitStack:
    """Write all of a shard; closing what is returned flushes it and gives it its name."""
    pieces = list(pieces)
    with ExitStack() as stack:
        file = stack.enter_context(writer)
        with ExitStack() as reading:
            paths = dict.fromkeys(piece.source.file for piece in pieces)
            shards = {path: reading.enter_context(Shard(path)) for path in paths}
            write_shard(pieces, shards, file, workers, power_of_two, done)
        return stack.pop_all()
    raise AssertionError


def _finish(stack: ExitStack, partial: Partial, name: str, writer: SafetensorsWriter) -> None:
    stack.close()
    partial.finished(name, writer.size, writer.header)


def _check_space(folder: Path, needed: int, target: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{target}: {needed / 1e9:.2f} GB are to be written and {free / 1e9:.2f} GB are free. Make room, or choose "
            "another disk; the same command then goes on."
        )


class _Count:
    """Bytes done, told to whoever asked."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, size: int) -> None:
        if size:
            self._done += size
            if self._progress is not None:
                self._progress(self._done, self._total)
