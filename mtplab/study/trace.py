"""`trace`: the target's output and the draft's proposals at every slot of it, once; every depth follows from that.

Keeps, saves and reads back; `decode/tracing.py` and `decode/chains.py` produce, `acceptance.py` concludes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.decode.settings import RunSettings
    from mtplab.decode.tracing import TargetOutput
    from mtplab.quant.policy import QuantPolicy
    from mtplab.study.acceptance import Acceptance

__all__ = ["TRACE_SCHEMA", "Trace", "decoded", "trace", "traced"]

TRACE_SCHEMA = 1
# array → (dtype as safetensors spells it, dimensions)
_LAYOUT = {
    "tokens": ("I32", 1), "output_lengths": ("I64", 1), "prompt_lengths": ("I64", 1), "hits": ("BOOL", 2),
    "log_q": ("F32", 2), "top": ("F32", 2), "log_p": ("F32", 1),
}  # fmt: skip
_ARRAYS = tuple(_LAYOUT)


@dataclass(frozen=True, eq=False)
class Trace:
    """What one pass over a set of prompts gave, for all depths up to `max_depth`.

    Prompts lie one behind the other: `tokens` int32 are their outputs, `output_lengths` [p] how long each is,
    `prompt_lengths` [p] the prompts'. A prompt with n tokens of output has n − 1 slots: slot i is a round that begins
    when i + 1 of them are there. Over all slots: `hits` [s, k] bool (draft j is the output's token, as are all before
    it), `log_q` [s, k] float32 (the draft's log-probability of that token; NaN past a miss, and at temperature 0),
    `top` [s, k] float32 (the draft's largest log-probability at temperature 1; NaN past a miss) and `log_p` [s]
    float32 (the target's log-probability of token i + 1; NaN at temperature 0). `settings` says what was run.
    """

    tokens: np.ndarray
    output_lengths: np.ndarray
    prompt_lengths: np.ndarray
    hits: np.ndarray
    log_q: np.ndarray
    top: np.ndarray
    log_p: np.ndarray
    domains: tuple[str, ...]
    settings: dict[str, Any]
    seconds: dict[str, float]  # "prompts", "decode", "draft"

    @property
    def max_depth(self) -> int:
        """The largest depth that can be asked for."""
        return self.hits.shape[1]

    @property
    def outputs(self) -> list[list[int]]:
        """Each prompt's output, as `generate` would give it at any depth at temperature 0."""
        ends = np.cumsum(self.output_lengths)
        return [self.tokens[end - size : end].tolist() for end, size in zip(ends, self.output_lengths, strict=True)]

    @property
    def output_hash(self) -> str:
        """SHA-256 of the outputs' ids, as a result row has it."""
        from mtplab.study.point import digest_of

        return digest_of(self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def alpha(self) -> tuple[np.ndarray, np.ndarray]:
        """(alpha [p, s, k] float64, slots [p]): probability that draft j is accepted, given that those before it were.

        Zero past a prompt's last slot. min(1, q/p) where drafts were drawn, else whether the draft hit.
        """
        slots = self.output_lengths - 1
        drawn = self.settings["spec"]["draft_sampling"] == "sampled" and self.settings["sampling"]["temperature"] > 0
        if drawn:
            after = self._log_p_of_drafts(slots)
            flat = np.exp(np.minimum(0.0, self.log_q.astype(np.float64) - after))
            flat = np.nan_to_num(flat, nan=0.0)
        else:
            flat = self.hits.astype(np.float64)
        found = np.zeros((len(slots), max(0, int(slots.max(initial=0))), self.max_depth))
        for row, part in enumerate(np.split(flat, np.cumsum(slots)[:-1])):
            found[row, : len(part)] = part
        return found, slots

    def _log_p_of_drafts(self, slots: np.ndarray) -> np.ndarray:
        """[s, k]: the target's log-probability of the token that draft j stands for; +inf past the output's end."""
        found = np.full(self.log_q.shape, np.inf)
        start = 0
        for count in slots:
            mine = self.log_p[start : start + count]
            for step in range(min(self.max_depth, count)):
                found[start : start + count - step, step] = mine[step:]
            start += count
        return found

    def narrowed(self, domain: str) -> Trace:
        """The trace of one domain's prompts alone. Raises ConfigError for a name that no prompt has."""
        rows = np.array([name == domain for name in self.domains])
        if not rows.any():
            known = ", ".join(map(repr, dict.fromkeys(self.domains)))
            raise ConfigError(f"domain is {domain!r}; expected one of {known}")
        slots = np.repeat(rows, self.output_lengths - 1)
        return replace(
            self,
            tokens=self.tokens[np.repeat(rows, self.output_lengths)],
            output_lengths=self.output_lengths[rows],
            prompt_lengths=self.prompt_lengths[rows],
            domains=tuple(name for name in self.domains if name == domain),
            **{name: getattr(self, name)[slots] for name in ("hits", "log_q", "top", "log_p")},
        )

    def acceptance(self) -> Acceptance:
        """Acceptance by depth, position, context and domain."""
        from mtplab.study.acceptance import Acceptance

        return Acceptance(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, atomically. Raises CheckpointError where it cannot be written."""
        import torch

        from mtplab.checkpoint import write_safetensors

        facts = {"domains": list(self.domains), "settings": self.settings, "seconds": self.seconds}
        write_safetensors(
            path,
            {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in _ARRAYS},
            {"mtplab_trace": str(TRACE_SCHEMA), "facts": json.dumps(facts)},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read back what `save` wrote; the arrays stay on disk, mapped into memory, until they are looked at.

        Raises CheckpointError for a file that is none, ConfigError for one that holds no trace.
        """
        from mtplab.checkpoint.header import read_header

        header = read_header(Path(path))
        infos = {info.name: info for info in header.tensors}
        if header.metadata.get("mtplab_trace") != str(TRACE_SCHEMA) or set(infos) != set(_ARRAYS):
            raise ConfigError(f"{path}: expected a trace of schema {TRACE_SCHEMA}, as Trace.save writes it.")
        try:
            facts = json.loads(header.metadata["facts"])
            domains, settings, seconds = tuple(facts["domains"]), facts["settings"], facts["seconds"]
            drawn = (settings["spec"]["draft_sampling"], settings["sampling"]["temperature"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{path}: the trace's settings cannot be read; trace again.") from None
        dtypes = {"BOOL": np.bool_, "I32": np.int32, "I64": np.int64, "F32": np.float32}
        kinds = {name: (info.dtype, len(info.shape)) for name, info in infos.items()}
        if kinds != _LAYOUT or not isinstance(drawn[1], int | float):
            raise ConfigError(f"{path}: the trace's arrays are {kinds}, expected {_LAYOUT}; trace again.")
        arrays = {}
        for name, info in infos.items():
            empty = not info.nbytes
            arrays[name] = (
                np.zeros(info.shape, dtypes[info.dtype])
                if empty
                else np.memmap(path, dtypes[info.dtype], "r", info.start, info.shape)
            )
        found = cls(**arrays, domains=domains, settings=settings, seconds=seconds)
        slots, prompts = len(found.log_p), len(found.output_lengths)
        fits = (
            found.hits.shape == found.log_q.shape == found.top.shape == (slots, found.hits.shape[1])
            and len(found.prompt_lengths) == len(domains) == prompts
            and bool((found.output_lengths >= 1).all())
            and int((found.output_lengths - 1).sum()) == slots
            and int(found.output_lengths.sum()) == len(found.tokens)
        )
        if not fits or not _sound(found, drawn):
            raise ConfigError(f"{path}: the trace's arrays do not belong together; trace again.")
        return found

    @property
    def approximate(self) -> bool:
        """Whether the output was given and is not what this target itself emits: acceptance is then that of the draft
        on another model's text."""
        given = self.settings.get("given")
        return given is not None and not given["own"]

    def __repr__(self) -> str:
        prompts, slots = len(self.output_lengths), len(self.log_p)
        said = ", approximate: the output was given" if self.approximate else ""
        return f"<Trace: {prompts} prompts, {slots} slots, depths 0 to {self.max_depth}{said}>"

    def __str__(self) -> str:
        from mtplab.study.trace_table import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from mtplab.study.trace_table import as_html

        return as_html(self)


def _sound(found: Trace, drawn: tuple[Any, Any]) -> bool:
    """Whether a file's values can be those of a trace: hits that begin each row, probabilities, settings that exist."""
    hits = np.asarray(found.hits).view(np.uint8)
    prefix = hits.max(initial=0) <= 1 and bool((hits[:, 1:] <= hits[:, :-1]).all())
    with np.errstate(invalid="ignore"):
        logs = all(not (np.asarray(x) > 1e-3).any() for x in (found.log_q, found.top, found.log_p))
    sampling, temperature = drawn
    return (
        prefix
        and logs
        and len(found.output_lengths) > 0
        and bool((found.prompt_lengths >= 1).all())
        and sampling in ("greedy", "sampled")
        and 0 <= temperature < float("inf")
        and all(isinstance(name, str) for name in found.domains)
    )


def trace(
    model: Any,
    prompts: Any,
    max_depth: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 128,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    quant_policy: str | int | QuantPolicy | None = None,
    draft_quant_policy: str | int | QuantPolicy | None = None,
    draft_sampling: str = "greedy",
    target_hidden: str | None = None,
    draft_hidden: str | None = None,
    exact: bool | None = None,
    ignore_eos: bool = False,
    max_batch: int = 64,
    threads: int | None = None,
    domains: Sequence[str] | None = None,
    on_round: Callable[[Any], None] | None = None,
    cancel: threading.Event | None = None,
    calibration: Any = None,
    output: Trace | Sequence[Sequence[int]] | None = None,
) -> Trace:
    """Decode the prompts once, plainly, and find what the draft would propose at every slot, for every depth at once.

    Arguments as `generate` has them; `max_depth` 1 to 16 takes the place of depth, `domains` names each prompt's, and
    `calibration` are the texts that a calibrated policy takes its scales from (the bundled prompts if None). At
    temperature 0, with exact arithmetic, every depth's counts are those of `generate` at that depth; above it they
    are the expectation over the runner's draws, given this output, of the same seed.

    `output`: the prompts' outputs, as another trace of them or lists of ids, in place of decoding; the target reads
    them in a few passes. Where they are what it would have emitted, the trace is that of decoding, to the last bit with
    exact arithmetic. Where they are another model's (the unquantised target's, say, for one of its variants),
    acceptance is that of this draft on that text: an approximation, which `Trace.approximate` and all that is shown of
    it says; `reference.against` shows it beside an exact trace. `max_new_tokens` is then the longest output's.

    Raises ConfigError as `generate` does, also for outputs that are none, Cancelled where `cancel` was set.
    """
    from mtplab.decode.settings import resolve_run
    from mtplab.study.prompts import calibration_ids
    from mtplab.study.questions import traced_depth
    from mtplab.study.reference import given_outputs

    if calibration is None:
        policies = (quant_policy, draft_quant_policy, model.engine.quant_policy, model.spec.quant_policy)
        calibration = calibration_ids(policies, model.encode)
    given = None if output is None else given_outputs(model, prompts, output)
    asked = resolve_run(
        model,
        prompts,
        max_depth,
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens if given is None else max(map(len, given)),
        top_k=top_k,
        top_p=top_p,
        quant_policy=quant_policy,
        draft_quant_policy=draft_quant_policy,
        draft_sampling=draft_sampling,
        target_hidden=target_hidden,
        draft_hidden=draft_hidden,
        exact=exact,
        compile=False,
        ignore_eos=ignore_eos,
        max_batch=max_batch,
        threads=threads,
        on_round=on_round,
        cancel=cancel,
        calibration=calibration,
    )
    traced_depth(max_depth)
    names = tuple(domains) if domains is not None else ("",) * len(asked.ids)
    if len(names) != len(asked.ids):
        raise ConfigError(f"domains has {len(names)} names for {len(asked.ids)} prompts; expected one for each")
    made, seconds = decoded(model, asked, on_round, cancel, given)
    found = traced(model, asked, names, made, seconds, cancel)
    if given is not None:
        ends = () if asked.sampling.ignore_eos else model.config.eos_token_ids
        past = any(token in ends for tokens in given for token in tokens[:-1])
        count = sum(map(len, given))
        found.settings["given"] = {"own": made.chosen == count and not past, "agreement": made.chosen / count}
    return found


def decoded(
    model: Any,
    asked: RunSettings,
    on_round: Callable[[Any], None] | None = None,
    cancel: threading.Event | None = None,
    given: list[list[int]] | None = None,
) -> tuple[TargetOutput, dict[str, float]]:
    """The target's half of a trace, which no draft changes, and the seconds of its parts; of outputs that are `given`,
    where they are."""
    import torch

    from mtplab.decode.threads import on_device, running_with
    from mtplab.decode.tracing import target_output

    with torch.inference_mode(), running_with(asked.threads), on_device(model.device):
        return target_output(model, asked, on_round, cancel, given)


def traced(
    model: Any,
    asked: RunSettings,
    domains: Sequence[str],
    output: TargetOutput,
    seconds: dict[str, float] | None = None,
    cancel: threading.Event | None = None,
) -> Trace:
    """A trace of the target's output up to the depth asked for; `seconds` are what `decoded` gave with it, None where
    it was there already."""
    import torch

    from mtplab.decode.chains import draft_table
    from mtplab.decode.threads import on_device, running_with

    with torch.inference_mode(), running_with(asked.threads), on_device(model.device):
        began = time.perf_counter()
        table = draft_table(model, asked, output, cancel)
        took = time.perf_counter() - began
    return Trace(
        tokens=np.concatenate([np.array(tokens, np.int32) for tokens in output.tokens]),
        output_lengths=np.array([len(tokens) for tokens in output.tokens]),
        prompt_lengths=np.array([len(ids) for ids in asked.ids]),
        hits=table.hits,
        log_q=table.log_q,
        top=table.top,
        log_p=output.log_p,
        domains=tuple(domains),
        settings=asked.to_dict() | {"draft_quant_policy": asked.draft_policy.name},
        seconds=(seconds or {"prompts": 0.0, "decode": 0.0}) | {"draft": took},
    )
