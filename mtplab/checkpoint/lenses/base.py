"""What lenses look at and what they say: a module as stored, an engine described, its verdicts and disagreements.

Only shapes of data: how lists are matched is `matching.py`'s, what an engine does is in the file of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mtplab.checkpoint.config_json import text_config

__all__ = [
    "BUILT",
    "LOAD_ERROR",
    "LOSSY",
    "SILENT",
    "UNKNOWN",
    "Consequence",
    "Disagreement",
    "Engine",
    "Family",
    "Fixed",
    "Method",
    "Verdict",
    "View",
    "family_of",
]

# what comes of building a module otherwise than it is stored
LOAD_ERROR, SILENT, LOSSY, UNKNOWN = "load error", "silent", "lossy", "not known"
# "fp8" stands for quantised, whatever the file's scheme; "ignored": no run of the engine reads the tensors
BUILT = ("fp8", "plain", "error", "ignored", "unknown")


class View(NamedTuple):
    """One module as it lies on disk: kind and part as `mtplab.checkpoint.names` gives them."""

    name: str
    kind: str
    part: str
    stored_fp8: bool
    has_scale: bool
    scale: str = ""  # what the file calls the scale beside it: weight_scale_inv; "": there is none, or it is not known


class Verdict(NamedTuple):
    """How an engine builds one module (one of BUILT), what decided, and the name the engine asks with."""

    module: str
    built: str
    by: str
    runtime_name: str


@dataclass(frozen=True)
class Disagreement:
    """Modules of one shape that an engine builds otherwise than the file holds them, or whose scale it misses.

    `cause` says what it builds and why, without the engine's name; `sentence` adds what comes of it.
    """

    engine: str
    modules: tuple[str, ...]
    built: str
    stored: str  # "fp8" or "plain"
    outcome: str
    cause: str
    sentence: str


class Consequence(NamedTuple):
    """What comes of a module built otherwise than stored, in a clause."""

    outcome: str
    clause: str


@dataclass(frozen=True)
class Fixed:
    """Modules that an engine builds one way whatever the list says.

    `names` is searched in the module's name on disk, numbers as `{0}`, `{1}`; `built` is one of BUILT or
    "as stored" (the engine goes by the tensors). Empty `methods` or `parts` mean all.
    """

    names: str
    built: str
    why: str
    methods: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """How an engine names the modules of one model family.

    `renames` turn a name on disk (numbers as `{0}`) into the one the engine asks with: regular expressions and
    replacements, in order; `entries` does the same to the entries of a list, before they are matched.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    entries: Callable[[list[str], str], list[str]] | None = None
    fixed: tuple[Fixed, ...] = ()
    note: str = ""
    plain_for_fp8: Consequence | None = None
    scales: bool = False  # whether its loader was seen to stop at a scale without a parameter, and not at one missing


@dataclass(frozen=True)
class Method:
    """How an engine reads the exclusion list of one `quant_method`.

    `rule` names one of `matching.RULES`; `keys` are where the list stands (dotted), the first that is there counts,
    or all with `combine`. `default` counts where there is no list, `added` always. `refuses` gives the reason
    why the engine does not load such a config, or None.
    """

    rule: str
    keys: tuple[str, ...]
    reads: str  # how an entry is taken, as a clause: "takes an entry for a module's full name"
    source: str
    combine: bool = False
    skip_empty: bool = True  # an empty list under the first key lets the next key count
    alone: str = ""  # an object of the config beside which, where it is there, no other key counts
    fp8: bool = True  # whether it reads FP8 weights under this method at all
    default: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    head: bool = True  # lm_head is asked for like any linear layer
    refuses: Callable[[dict[str, Any]], str | None] | None = None
    unsure: Callable[[dict[str, Any]], str | None] | None = None  # likewise, why what it does is not known
    prepare: Callable[[list[str], dict[str, Any]], list[str]] | None = None
    fp8_for_plain: Consequence | Callable[[dict[str, Any]], Consequence | None] | None = None
    scale: Callable[[dict[str, Any]], str] | None = None  # what a module's scale has to be called, where it is known
    # compressed-tensors: what becomes of a module that no target covers, and whether a class target may be a part
    untargeted: str = ""
    class_parts: bool = True
    unknown: str = ""  # why the lens does not judge this method


@dataclass(frozen=True)
class Engine:
    """One engine as read in its source: versions and places stand beside every rule."""

    name: str
    version: str
    sources: tuple[str, ...]
    methods: Mapping[str, Method]
    families: Mapping[str, Family]  # "" is every model that no other entry names
    fp8_for_plain: Consequence
    plain_for_fp8: Consequence
    unread: str  # what the engine does with a quant_method it does not read
    unread_built: str = "error"
    warnings: tuple[str, ...] = ()


def family_of(config: dict[str, Any]) -> tuple[str, bool]:
    """(family, loaded as text model only): qwen3_5, qwen3_next, deepseek_v3, glm4_moe, or "" for any other."""
    text = text_config(config)
    kinds = [str(place.get("model_type", "")) for place in (config, text)]
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    text_only = not str(first).endswith("ForConditionalGeneration") if first else text is config
    for kind in kinds:
        for family in ("qwen3_5", "qwen3_next"):
            if kind.startswith(family):
                return family, text_only
        if kind in ("deepseek_v3", "deepseek_v32", "kimi_k2"):
            return "deepseek_v3", text_only
        if kind == "glm4_moe":
            return kind, text_only
    return "", text_only
