"""A shard read, converted and written a band of rows at a time, several bands side by side.

Each thread reads a band, makes of it what is to be written, and writes it to its place; no tensor is ever whole in
memory. A scale for a whole tensor takes a pass over its rows before the one that writes. Knows pieces; nothing of
settings, and of files no more than one shard of either side.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from mtplab.checkpoint import SafetensorsWriter
from mtplab.checkpoint.convert.encode import block_amax, encode, scales_of, scratch
from mtplab.checkpoint.convert.layouts import grid_of
from mtplab.checkpoint.convert.pieces import CARRY, COPY, DECODE, Piece
from mtplab.checkpoint.convert.rows import Shard, matrix
from mtplab.checkpoint.strict_json import shown
from mtplab.checkpoint.values import read_scale
from mtplab.errors import CheckpointError

__all__ = ["Pool", "pool", "write_shard"]

BAND = 1 << 20  # elements of a band; one row of blocks where that is more
_COPY_BAND = 4 << 20  # bytes
_MAX_THREADS = 8
_Task = Callable[[], Any]


class Pool:
    """Threads that run tasks in order of their coming, few of them waiting; made by `pool`."""

    def __init__(self, executor: ThreadPoolExecutor, threads: int) -> None:
        self._executor, self._waiting = executor, 2 * threads

    def run(self, tasks: Iterable[tuple[_Task, int]], done: Callable[[int], None]) -> Iterator[Any]:
        """Results of (task, bytes it reads) in order; `done` is told the bytes, in the calling thread."""
        running: deque[tuple[Future[Any], int]] = deque()
        try:
            for task, size in tasks:
                running.append((self._executor.submit(task), size))
                while len(running) > self._waiting:
                    yield self._next(running, done)
            while running:
                yield self._next(running, done)
        finally:
            for future, _ in running:
                future.cancel()
            for future, _ in running:
                if not future.cancelled():
                    future.exception()  # waits: a band that is being written must not outlive its file

    @staticmethod
    def _next(running: deque[tuple[Future[Any], int]], done: Callable[[int], None]) -> Any:
        # taken off only once it is over, so that an interrupt while waiting leaves it to be waited for
        result = running[0][0].result()
        _, size = running.popleft()
        done(size)
        return result


@contextmanager
def pool(threads: int | None = None) -> Iterator[Pool]:
    """As many threads as the machine has cores, at most 8, each of which has torch work on one core."""
    count = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    before = torch.get_num_threads()
    # threads that start from here on take this over
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "convert", initializer=torch.set_num_threads, initargs=(1,)) as executor:
            yield Pool(executor, count)
    finally:
        torch.set_num_threads(before)


def write_shard(
    pieces: Sequence[Piece], shards: dict[Any, Shard], file: SafetensorsWriter, workers: Pool,
    power_of_two: bool, done: Callable[[int], None],
) -> None:  # fmt: skip
    """Write what `pieces` say into `file`. `shards`: the sources' files, open, by path.

    Raises CheckpointError for values that cannot be quantised, damaged codes, and files that cannot be read or written.
    """
    runs = (_Run(piece, shards[piece.source.file], file, workers, power_of_two, done) for piece in pieces)
    for _ in workers.run((task for run in runs for task in run.tasks()), done):
        pass


class _Run:
    """One piece's tasks."""

    def __init__(
        self, piece: Piece, shard: Shard, file: SafetensorsWriter, workers: Pool, power_of_two: bool,
        done: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.piece, self.shard, self.file, self.workers, self.done = piece, shard, file, workers, done
        self.power_of_two = power_of_two
        self.rows, self.k, self.width = matrix(piece.source)
        self.stored_scale: torch.Tensor | None = None

    def tasks(self) -> Iterator[tuple[_Task, int]]:
        piece = self.piece
        if not piece.source.nbytes:
            yield self._empty, 0
            return
        if piece.pair is not None and piece.action != COPY:
            self.stored_scale = read_scale(piece.pair)
        if piece.action in (COPY, CARRY):
            yield from self._bytes()
            if piece.action == CARRY:
                assert piece.scale is not None and self.stored_scale is not None
                if self.power_of_two and not bool((self.stored_scale.frexp().mantissa == 0.5).all()):
                    assert piece.pair is not None
                    scale = piece.pair.scale
                    raise CheckpointError(
                        f"{scale.file}: tensor {shown(scale.name)} holds other scales than powers of two, which the "
                        "config promises (scale_fmt 'ue8m0'). Write it with float scales, or correct the config."
                    )
                self.file.put(piece.scale.name, self.stored_scale.reshape(piece.scale.shape))
        elif piece.action == DECODE:
            for start, stop in self._bands(1):
                yield (lambda start=start, stop=stop: self._decode(start, stop)), (stop - start) * self.width
        else:
            yield from self._encoding()

    def _bands(self, multiple: int) -> Iterator[tuple[int, int]]:
        step = max(1, BAND // max(1, self.k) // multiple) * multiple
        for start in range(0, self.rows, step):
            yield start, min(self.rows, start + step)

    def _empty(self) -> None:
        for output in self.piece.outputs:
            count = output.nbytes
            self.file.put_bytes(output.name, 0, torch.zeros(count, dtype=torch.uint8) if count else None)

    def _bytes(self) -> Iterator[tuple[_Task, int]]:
        info, name = self.piece.source, self.piece.out.name

        def copy(start: int, stop: int) -> None:
            raw = scratch("raw", stop - start, torch.uint8)
            self.shard.fill(info, start, raw)
            self.file.put_bytes(name, start, raw)

        for start in range(0, info.nbytes, _COPY_BAND):
            stop = min(info.nbytes, start + _COPY_BAND)
            yield (lambda start=start, stop=stop: copy(start, stop)), stop - start

    def _values(self, start: int, stop: int) -> torch.Tensor:
        """BF16, F16 or F32 [rows, k]."""
        pair = self.piece.pair
        if pair is None:
            return self.shard.raw(self.piece.source, start, stop)
        assert self.stored_scale is not None
        return self.shard.values(pair, self.stored_scale, start, stop)

    def _decode(self, start: int, stop: int) -> None:
        values = self._values(start, stop)
        out = scratch("out", 2 * values.numel(), torch.uint8)
        out.view(torch.bfloat16).view(values.shape).copy_(values)
        # all bits of the exponent: infinite by its scale, or just too large for BF16
        bits = torch.bitwise_and(out.view(torch.int16), 0x7FFF, out=scratch("bits", values.numel(), torch.int16))
        if int(bits.amax()) >= 0x7F80:
            self._refuse()
        self.file.put_bytes(self.piece.out.name, 2 * start * self.k, out)

    def _encoding(self) -> Iterator[tuple[_Task, int]]:
        block, scale = self.piece.block, self.piece.scale
        assert block is not None and scale is not None
        whole: torch.Tensor | None = None
        bands = list(self._bands(1 if block[0] >= self.rows else block[0]))
        if block[0] >= self.rows and len(bands) > 1:
            # a scale reaches over all rows: its magnitude first, then the codes
            tasks = (((lambda start=a, stop=b: self._amax(start, stop)), 0) for a, b in bands)
            found = list(self.workers.run(tasks, self.done))
            whole = self._scale(torch.cat(found).amax(0, keepdim=True))
            self.file.put(scale.name, whole.reshape(scale.shape))
        for start, stop in bands:
            task = lambda start=start, stop=stop: self._encode(start, stop, whole)  # noqa: E731
            yield task, (stop - start) * self.width

    def _amax(self, start: int, stop: int) -> torch.Tensor:
        values = self._values(start, stop)
        assert self.piece.block is not None
        return block_amax(values, (len(values), self.piece.block[1]))

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        scale = scales_of(amax, self.power_of_two)
        if not bool(scale.isfinite().all()):
            self._refuse()
        return scale

    def _encode(self, start: int, stop: int, whole: torch.Tensor | None) -> None:
        block, scale = self.piece.block, self.piece.scale
        assert block is not None and scale is not None
        values = self._values(start, stop)
        if whole is None:
            made = self._scale(block_amax(values, block))
            row = 4 * grid_of((self.rows, self.k), block)[1]
            self.file.put_bytes(scale.name, start // block[0] * row, made.view(torch.uint8).reshape(-1))
        else:
            made, block = whole, (len(values), block[1])
        out = scratch("out", values.numel(), torch.uint8)
        encode(values, made, block, out.view(values.shape))
        self.file.put_bytes(self.piece.out.name, start * self.k, out)

    def _refuse(self) -> None:
        """Raises, having counted all that is NaN or infinite in what is written."""
        info, bad, first = self.piece.source, 0, None
        to_bf16 = self.piece.action == DECODE
        for start, stop in self._bands(1):
            values = self._values(start, stop)
            wrong = ~(values.bfloat16() if to_bf16 else values).isfinite()
            if first is None and bool(wrong.any()):
                row, column = wrong.nonzero()[0].tolist()
                first = [start + row, column]
            bad += int(wrong.sum())
        found = f"{info.file}: tensor {shown(info.name)}: {bad} of {self.rows * self.k} values are NaN or infinite"
        if to_bf16:
            raise CheckpointError(
                f"{found} in BF16, expected all to be finite; the first is at {first}. Correct the scale that makes "
                "them so, or leave the module in FP8."
            )
        raise CheckpointError(
            f"{found}, expected none to quantise; the first is at {first}. Correct the source, or exclude the module."
        )
