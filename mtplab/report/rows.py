"""Result rows as figures, explorer and panels read them: plain dicts, each with the labels of its series.

A row may come as a `ResultRow`, as a dict read from JSON, or inside a sweep's result. This module does not
know how a row was measured; a field that is missing stays None and is drawn as a gap, never as a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mtplab.errors import ConfigError
from mtplab.study.fields import fact_of, has_length
from mtplab.study.interval import length_error
from mtplab.study.soundness import faults
from mtplab.study.speed import odd_timings
from mtplab.study.words import cache_words, engine_words, weights_words

__all__ = [
    "LABELS",
    "Record",
    "as_records",
    "at_temperature",
    "besides",
    "group_series",
    "policy_label",
    "weights_label",
]

Record = dict[str, Any]

#: What is added to a row for display, and left out where rows are taken home.
LABELS = ("policy_label", "weights_label", "series", "length_error", "domain_errors", "odd_timing", "target_fault")

_TELLING = ("method", "prompt_set", "max_new_tokens", "seed", "top_k", "top_p")
# likewise, of what provenance has of a row's point
_TELLING_FACTS = ("draft_sampling", "target_hidden", "draft_hidden", "ignore_eos", "exact", "dtype")


def as_records(rows: Any) -> list[Record]:
    """Every row as a dict with a key more for each of `LABELS`.

    A dict's `source`, the file it came from, begins its line's name where there are several.
    `policy_label`, `weights_label` and `series` name its line; `length_error` is the ± of its acceptance length, with
    `domain_errors` by domain (None where it cannot be told); `odd_timing` says how many times slower than the other
    rows its rounds were, where that is so much that the machine must have been busy; `target_fault` why its target is
    broken, where it is.

    Args:
        rows: a sweep's result (anything with `.rows`), or an iterable of rows (pydantic models or mappings).

    Raises:
        ConfigError: something in `rows` is not a row, that is, it has no `depth`.
    """
    items: Iterable[Any] = getattr(rows, "rows", rows)
    records = [_as_record(item, position) for position, item in enumerate(items)]
    _name_lines(records)
    for record, odd, fault in zip(records, odd_timings(records), faults(records), strict=True):
        record["length_error"] = length_error(record)
        record["domain_errors"] = {name: length_error(record, name) for name in record.get("by_domain") or {}}
        record["odd_timing"] = odd
        record["target_fault"] = fault
    return records


def _as_record(item: Any, position: int) -> Record:
    dump = getattr(item, "model_dump", None)
    record = dict(dump(mode="json", by_alias=True)) if dump else dict(item) if isinstance(item, Mapping) else {}
    if "depth" not in record:
        raise ConfigError(
            f"row {position} is a {type(item).__name__} without `depth`; "
            "give rows of mtplab.sweep or dicts with the same fields"
        )
    return record


def _name_lines(records: list[Record]) -> None:
    """What else tells two lines of this study apart goes into their labels, or they would be drawn as one."""
    files = _grouped(records, lambda record: record.get("source"))
    several = any(len({_origin(record) for record in found}) > 1 for found in files.values())
    # some are set to one value at temperature 0, where nothing looks at them: that tells no lines apart
    alike = _grouped(records, lambda record: (record.get("source"), record.get("temperature"))).values()
    # whose numbers they are is told wherever any are not of mtplab's own runner
    also = ["engine"] if any(record.get("engine") is not None for record in records) else []
    # how an engine computes is its own: its name has told that already
    alike = [same for found in alike for same in _grouped(found, lambda record: record.get("engine")).values()]
    also += [key for key in _TELLING if any(len({str(r.get(key)) for r in found}) > 1 for found in alike)]
    also += [key for key in _TELLING_FACTS if any(len(_known(found, key)) > 1 for found in alike)]
    for same in _grouped(records, lambda record: (record.get("source"), _origin(record))).values():
        # one name for two contents: the checkpoint changed between two sweeps
        changed = len({_content(record) for record in same} - {""}) > 1
        for record in same:
            told = [_content(record)[:17]] if changed else []
            told += [_told(key, _value(record, key)) for key in also if _value(record, key) is not None]
            file = [str(record["source"])] if len(files) > 1 else []
            record["policy_label"] = policy_label(record)
            record["weights_label"] = " · ".join([*file, weights_label(record, with_origin=several), *told])
            record["series"] = f"{record['weights_label']} · {record['policy_label']} cache"


def _grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def policy_label(record: Mapping[str, Any]) -> str:
    """`int8`, or `int8 (draft unquantised)` where the draft's cache differs."""
    return cache_words(str(record.get("quant_policy") or "none"), record.get("draft_quant_policy"))


def weights_label(record: Mapping[str, Any], with_origin: bool = False) -> str:
    """The exclusion set in a few words, whatever else tells the lines of a study apart; with the checkpoint before it
    where a study mixes them."""
    label = str(record.get("exclude_label") or _globs(record.get("exclude")) or "published")
    draft = record.get("draft_exclude")
    if draft is not None and draft != record.get("exclude") and "(draft: " not in label:
        label += f" (draft: {_globs(draft) or 'none'})"
    label = weights_words(label, record.get("model_format"))
    return f"{_origin(record)}: {label}" if with_origin else label


def _globs(exclude: Any) -> str:
    if exclude is None:
        return ""
    return exclude if isinstance(exclude, str) else ", ".join(str(glob) for glob in exclude) or "none"


def _origin(record: Mapping[str, Any]) -> str:
    return str(record.get("checkpoint") or "model").rstrip("/").rsplit("/", 1)[-1]


def _told(key: str, value: Any) -> str:
    if key == "max_new_tokens":
        return f"{value} tokens"
    return str(value) if key in ("engine", "method", "prompt_set") else f"{key} {value}"


def _value(record: Mapping[str, Any], key: str) -> Any:
    """A setting, or a fact of the row's point."""
    if key == "engine":
        return engine_words(record.get("engine"))
    return record[key] if key in record else fact_of(record, "config", key)


def _content(record: Mapping[str, Any]) -> str:
    """The checkpoint's content hash; empty where the row does not say."""
    return str(fact_of(record, "config", "checkpoint") or "")


def _known(records: Iterable[Mapping[str, Any]], key: str) -> set[str]:
    return {str(value) for record in records if (value := _value(record, key)) is not None}


def besides(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What two rows must share to be compared by exclusions and caches: file, checkpoint and its content, prompts, and
    how they were run."""
    keys = ("source", "checkpoint", "n_prompts", *_TELLING, *_TELLING_FACTS, "prompt_digest")
    return *(str(_value(record, key)) for key in keys), _content(record)


def at_temperature(records: list[Record], temperature: float | None = None) -> list[Record]:
    """Rows at one temperature: the one given, or the lowest there is."""
    found = {record.get("temperature") or 0.0 for record in records}
    chosen = min(found, default=0.0) if temperature is None else temperature
    return [record for record in records if (record.get("temperature") or 0.0) == chosen]


def group_series(records: list[Record]) -> dict[str, list[Record]]:
    """series -> its rows that have a result, sorted by depth; series in the order they first appear."""
    series: dict[str, list[Record]] = {}
    for record in records:
        if has_length(record):
            series.setdefault(record["series"], []).append(record)
    return {name: sorted(found, key=lambda record: record["depth"]) for name, found in series.items()}
