"""The target's quality beside a point's acceptance: measured once for all points of one target, and kept.

What a target does depends neither on the draft nor on the temperature: KL, top-1 agreement and perplexity are those of
weights, cache policy and text. They lie in `<results>/quality/<key>.json`, the texts that the reference wrote in
`<results>/texts/<key>.json`; both are written whole or not at all by whoever holds their lock, and may be deleted: rows
keep their own numbers.

The text is the reference's own, written at temperature 1 from the point's prompts, so that KL over its positions
estimates the divergence of whole texts. Without a reference it is the prompts. Knows nothing of acceptance or grids.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtplab.errors import ConfigError
from mtplab.study.point import QUALITY_SCHEMA, TEXT_SEED, digest_of
from mtplab.study.quality import KEPT_BYTES, logits_bytes
from mtplab.study.row import QUALITY_FIELDS
from mtplab.study.soundness import NOT_FINITE
from mtplab.study.store import PointStore, write_atomically

if TYPE_CHECKING:
    from mtplab.study.worker import Unit, Variant

__all__ = ["QualityMeter", "QualityTask", "TargetQuality"]

Owned = Callable[[str], contextlib.AbstractContextManager[bool]]


@dataclass(frozen=True)
class QualityTask:
    """What to measure for a point's target. `key` names the target, the reference and the text together; `texts` names
    the texts of the reference, whose content hash is `identity`. Without a reference `note` says why."""

    key: str
    texts: str | None = None
    reference: Variant | None = None
    identity: str | None = None
    note: str | None = None


class TargetQuality(BaseModel):
    """What was measured over `tokens` predicted tokens of `texts` texts: as in `ResultRow`, and in `seconds`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    quality_schema: Literal[1] = QUALITY_SCHEMA
    key: str
    kl: Annotated[float, Field(ge=0.0)] | None = None
    kl_error: Annotated[float, Field(ge=0.0)] | None = None
    top1_agreement: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    perplexity: Annotated[float, Field(ge=1.0)] | None = None
    reference_perplexity: Annotated[float, Field(ge=1.0)] | None = None
    quality_text: str | None = None
    quality_note: str | None = None
    texts: int = 0
    tokens: int = 0
    reference: str | None = None
    seconds: float = 0.0

    @classmethod
    def failed(cls, problem: str) -> TargetQuality:
        """Nothing was measured, for this reason; its key is that of no target, so that it is tried again."""
        return cls(key="", quality_note=f"the target's quality could not be measured: {problem}")

    def row_fields(self) -> dict[str, Any]:
        """As the row's fields."""
        return {name: getattr(self, name) for name in QUALITY_FIELDS}

    def about(self) -> dict[str, Any]:
        """For the row's provenance, JSON-ready."""
        return {name: getattr(self, name) for name in ("key", "reference", "texts", "tokens", "seconds")}


@dataclass(frozen=True)
class _Read:
    """A reference over texts: what it wrote, how many tokens of each are not judged, and its logits or itself."""

    texts: list[list[int]]
    skips: list[int]
    reading: Any
    nbytes: int


class QualityMeter:
    """Measures targets for one process (or thread) of a sweep, and keeps what the references said meanwhile.

    Args:
        limit: bytes of logits that are kept, those of the texts used last; tokens × vocabulary × 4 a set of texts. A
            set that is larger alone is not kept: its reference stays in memory beside the target instead.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = KEPT_BYTES if limit is None else limit
        self._read: dict[str, _Read] = {}
        self._model: tuple[str, Any] | None = None  # a reference that is read again for each target

    def of(
        self,
        unit: Unit,
        store: PointStore,
        load: Callable[[Variant, bool], Any],
        owned: Owned,
        cancel: Any = None,
    ) -> TargetQuality:
        """The quality of the unit's target: from disk where it is there, else measured and kept.

        `load(variant, reference)` gives a model, `owned(name)` waits for a lock of this name. Raises Cancelled, and
        what loading and decoding raise.
        """
        from mtplab.decode import Cancelled

        task = unit.quality
        path = store.folder / "quality" / f"{task.key}.json"
        with owned(f"quality-{task.key}") as held:
            if not held or (cancel is not None and cancel.is_set()):
                raise Cancelled("cancelled before the target's quality was measured")
            found = _kept(path, task.key)
            if found is None:
                found = self._measured(unit, store, load, owned, cancel)
                _keep(path, found.model_dump_json().encode())
        return found

    def _measured(self, unit: Unit, store: PointStore, load: Any, owned: Owned, cancel: Any) -> TargetQuality:
        from mtplab.study.quality import quality

        task, config = unit.quality, unit.config
        began = time.monotonic()
        if task.reference is None:
            texts = [list(ids) for ids in config.prompts if len(ids) > 1]
            if not texts:
                return TargetQuality(key=task.key, quality_note=f"{task.note}; no prompt has two tokens to judge")
            mine = _Read(texts, [0] * len(texts), None, 0)
        else:
            mine = self._reference(unit, store, load, owned, cancel)
        model = load(unit.variant, False)
        found = quality(
            model,
            mine.texts,
            mine.reading,
            quant_policy=config.quant_policy,
            skip=mine.skips,
            exact=config.exact,
            cancel=cancel,
            **({} if config.calibration is None else {"calibration": [list(ids) for ids in config.calibration]}),
        )
        numbers = {
            "kl": found.mean_kl,
            "kl_error": found.kl_interval(),
            "top1_agreement": found.top1_agreement,
            "perplexity": found.perplexity,
            "reference_perplexity": found.reference_perplexity,
        }
        note = task.note
        odd = [name for name, value in numbers.items() if value is not None and not math.isfinite(value)]
        if odd:
            note = "; ".join(filter(None, [note, NOT_FINITE]))
            numbers |= dict.fromkeys(["kl", "kl_error", "top1_agreement", "perplexity"])
            numbers |= dict.fromkeys(odd)
        digest = digest_of([mine.texts, mine.skips])
        return TargetQuality(
            key=task.key,
            **numbers,
            quality_text=f"{'prompts' if task.reference is None else 'own'}:{digest[:12]}",
            quality_note=note,
            texts=len(mine.texts),
            tokens=len(found.nll),
            reference=task.identity,
            seconds=round(time.monotonic() - began, 3),
        )

    def _reference(self, unit: Unit, store: PointStore, load: Any, owned: Owned, cancel: Any) -> _Read:
        """What the reference wrote and thinks of it: kept, or made with the reference, which is loaded first."""
        from mtplab.study.quality import own_texts, read

        task, config = unit.quality, unit.config
        kept = self._read.pop(task.texts, None)
        if kept is None:
            stays = self._model is not None and self._model[0] == task.reference.key
            model = self._model[1] if stays else load(task.reference, True)
            prompts = [list(ids) for ids in config.prompts]
            path = store.folder / "texts" / f"{task.texts}.json"
            with owned(f"texts-{task.texts}"):
                texts = _kept_texts(path, prompts, model.config.vocab_size)
                if texts is None:
                    texts = own_texts(
                        model,
                        prompts,
                        config.max_new_tokens,
                        TEXT_SEED,
                        exact=config.exact,
                        cancel=cancel,
                    )
                    _keep(path, json.dumps({"schema": QUALITY_SCHEMA, "texts": texts}).encode())
            size = logits_bytes(model, texts)
            fits = size <= self.limit
            while fits and self._read and size + sum(one.nbytes for one in self._read.values()) > self.limit:
                del self._read[next(iter(self._read))]
            if not fits:  # both models are read side by side then, and only a segment's logits are there at once
                self._read = {key: one for key, one in self._read.items() if one.nbytes}
                self._model = (task.reference.key, model)
            reading = read(model, texts, config.exact, cancel) if fits else model
            kept = _Read(texts, [len(prompt) - 1 for prompt in prompts], reading, size if fits else 0)
        self._read[task.texts] = kept  # the last used is the last to go
        return kept


def _kept(path: Path, key: str) -> TargetQuality | None:
    """What a file holds; None where there is none that can be read."""
    try:
        found = TargetQuality.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return found if found.key == key else None


def _kept_texts(path: Path, prompts: list[list[int]], vocab: int) -> list[list[int]] | None:
    """Texts of a file, each of which must continue its prompt; None where there are none that can be read."""
    try:
        found = json.loads(path.read_bytes())["texts"]
        whole = len(found) == len(prompts) and all(
            len(text) > len(prompt) and text[: len(prompt)] == prompt
            for text, prompt in zip(found, prompts, strict=True)
        )
        return found if whole and all(type(t) is int and 0 <= t < vocab for text in found for t in text) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _keep(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"{path.parent}: cannot be made ({problem.strerror}); give another folder") from None
    write_atomically(path, content)
