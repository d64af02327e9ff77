"""The explorer: every row of a study in one cell that stays alive with no kernel and no network.

A sandboxed `<iframe srcdoc>` holds the rows as JSON, a little vanilla JavaScript and an SVG. It works the
same in JupyterLab, after papermill and in an exported file. This module does not know how rows are
measured; the page in `assets/` does not know anything but the rows.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from mtplab.report.palette import DASHES, MARKER_NAMES, policy_colours
from mtplab.report.rows import LABELS, Record, as_records
from mtplab.report.text import json_island

__all__ = ["ROWS_MIME", "SweepExplorer"]

#: Beside the HTML, the rows themselves travel in the notebook under this type, so that a report can be
#: rebuilt or compared without parsing its page.
ROWS_MIME = "application/vnd.mtplab.rows+json"

_MISSING = object()


def _common(provenances: list[dict[str, Any]]) -> dict[str, Any]:
    """What all of them have with equal values, entries of nested dicts each for itself."""
    shared: dict[str, Any] = {}
    for key, value in (provenances[0] if provenances else {}).items():
        values = [provenance.get(key, _MISSING) for provenance in provenances]
        if all(isinstance(each, dict) for each in values):
            shared[key] = _common(values)
        elif all(each == value for each in values):
            shared[key] = value
    return shared


def _without(provenance: dict[str, Any] | None, shared: dict[str, Any]) -> dict[str, Any]:
    """What `shared` lacks; the page puts the two together again."""
    rest: dict[str, Any] = {}
    for key, value in (provenance or {}).items():
        if key not in shared:
            rest[key] = value
        elif isinstance(value, dict) and value != shared[key]:
            rest[key] = _without(value, shared[key])
    return rest


@cache
def _asset(name: str) -> str:
    return files("mtplab.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def script_hash() -> str:
    """`sha256-…` of the explorer's script, for a content security policy that lets no other script run."""
    digest = hashlib.sha256(_asset("explorer.js").encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


class SweepExplorer:
    """Interactive view of a study's rows: controls, hover values, table, keyboard, download.

    Args:
        rows: rows of a sweep, or dicts with the same fields.
        height: height of the frame in CSS pixels.
        first: how many exclusion sets are ticked at first where there are more lines than can be told apart.

    Raises:
        ConfigError: something in `rows` is not a row.
    """

    def __init__(self, rows: Any, height: int = 640, first: int = 1):
        self.records: list[Record] = as_records(rows)
        self.height, self.first = int(height), int(first)

    @property
    def rows(self) -> list[Record]:
        """The rows as they were given, without the labels made for display."""
        return [{key: value for key, value in record.items() if key not in LABELS} for record in self.records]

    def document(self) -> str:
        """The page inside the frame: one HTML document that asks for nothing from outside."""
        policies = list(dict.fromkeys(record["policy_label"] for record in self.records))
        weights = list(dict.fromkeys(record["weights_label"] for record in self.records))
        # most of a row's provenance is the same in every row: that is written once
        shared = _common([record.get("provenance") or {} for record in self.records])
        data = {
            "rows": [{**record, "provenance": _without(record.get("provenance"), shared)} for record in self.records],
            "provenance": shared,
            "policies": policies,
            "weights": weights,
            "labels": LABELS,
            "first": self.first,
            "palette": {"colours": policy_colours(policies), "markers": MARKER_NAMES, "dashes": DASHES},
        }
        page = _asset("explorer.html").replace("%CSS%", _asset("explorer.css")).replace("%HASH%", script_hash())
        # the data goes in last and by hand: text inside it must not be taken for a placeholder
        before, _, after = page.replace("%JS%", _asset("explorer.js")).partition("%DATA%")
        return before + json_island(data) + after

    def _repr_html_(self) -> str:
        # in a single-quoted attribute only these two signs need care, and the JSON keeps its quotes
        source = self.document().replace("&", "&amp;").replace("'", "&#39;")
        return (
            f'<iframe class="mtplab-explorer" title="Acceptance explorer" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:1px solid #8b949e66;border-radius:8px" '
            f"srcdoc='{source}'></iframe>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self), ROWS_MIME: {"rows": self.rows}}

    def __repr__(self) -> str:
        depths = sorted({record["depth"] for record in self.records})
        settings = len({record["series"] for record in self.records})
        return f"SweepExplorer({len(self.records)} rows: {settings} settings × {len(depths)} depths)"
