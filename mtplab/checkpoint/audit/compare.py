"""A checkpoint against the one it was made from: what the conversion lost, reshaped or counts otherwise.

Module by module, by names under the text model's root, so that quantising (which adds scales and changes dtypes) and
taking off a multimodal wrapper are no differences. Reads headers only; `values_findings` alone reads values and needs
torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.draft_layouts import COUNT_KEYS
from mtplab.checkpoint.names import draft_prefixes, module_of, normalised, of_other_senses, part_of
from mtplab.checkpoint.pairing import SCALE_SUFFIXES
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

if TYPE_CHECKING:
    from mtplab.checkpoint.plan import ModulePlan

__all__ = ["compare", "compared", "values_findings"]

# what changes the model where it changes; dtype, cache and generation settings may
_COUNTED = (
    *COUNT_KEYS, "num_hidden_layers", "hidden_size",
    "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "n_routed_experts", "num_experts_per_tok", "vocab_size", "tie_word_embeddings", "rms_norm_eps",
    "rope_theta", "rope_parameters", "rope_scaling", "layer_types", "model_type",
)  # fmt: skip
_ONE_BY_ONE = re.compile(r"\.experts\.[0-9]+\.")
# rms of the difference over rms: E4M3 blocks of the bundled model 0.0262 to 0.0267, a BF16 cast at most 2^-9
_FP8_ERROR, _CAST_ERROR = 0.1, 0.01


def compare(subject: Subject, source: Subject) -> list[Finding]:
    """What `source` has and `subject` has not, or has otherwise."""
    return [*_tensors(subject, source), *_config(subject, source)]


def _by_name(subject: Subject) -> dict[str, ModulePlan]:
    return {normalised(m.name): m for m in subject.modules if not m.name.endswith(SCALE_SUFFIXES)}


def _tensors(subject: Subject, source: Subject) -> Iterator[Finding]:
    here, there = _by_name(subject), _by_name(source)
    indexed_away = {normalised(module_of(name)) for name in subject.ckpt.files.unindexed}
    drafts = draft_prefixes(source.config)
    experts = set(map(_expert, here))
    lost: dict[str, list[str]] = {"draft": [], "vision": [], "target": []}
    for name, module in there.items():
        if name in here or name in indexed_away:
            continue
        # experts are stored one by one or stacked, and writers change one into the other
        mine = _expert(name)
        if mine is not None and mine not in experts and _otherwise(mine) in experts:
            continue
        if module.part == "head" and subject.text.get("tie_word_embeddings") is True:
            continue
        part = "draft" if part_of(name, drafts) == "draft" else "vision" if of_other_senses(name) else "target"
        lost[part].append(module.name)
    told = {
        "draft": ("error", "The draft head is not there, or not whole: acceptance 0 %, or no speculation."),
        "target": ("error", "Loaders leave these modules as they are initialised, or refuse the checkpoint."),
        "vision": ("note", "The text model runs without them."),
    }
    for part, names in lost.items():
        if names:
            severity, why = told[part]
            what = {"draft": "of the draft head", "vision": "of the vision tower", "target": "of the target"}[part]
            yield Finding(
                severity, f"lost-{part}",
                f"{len(names)} modules {what} are in {source.ckpt.path} and not here: {listed(names)}.", tuple(names),
                why, "Convert again with a tool that keeps them, or copy them over." if part != "vision" else "",
            )  # fmt: skip
    reshaped = [name for name in here if name in there and here[name].shape != there[name].shape]
    if reshaped:
        first = reshaped[0]
        yield Finding(
            "error", "changed-shape",
            f"{len(reshaped)} modules have another shape than in {source.ckpt.path}: {listed(reshaped)} "
            f"({list(here[first].shape)}, there {list(there[first].shape)}).", tuple(here[n].name for n in reshaped),
            "They are cut, padded, transposed or packed: what reads the one does not read the other.",
            "Convert again.",
        )  # fmt: skip
    added = [here[name].name for name in here if name not in there and ".experts" not in name]
    if added:
        yield Finding(
            "note", "added",
            f"{len(added)} modules are here and not in {source.ckpt.path}: {listed(added)}.", tuple(added),
            "Renamed modules are found both here and among the lost ones.",
        )  # fmt: skip


def _expert(name: str) -> tuple[str, bool] | None:
    """An expert's layer, and whether its module is stored by itself, not in a stack; None of what is no expert's."""
    place, experts, _ = name.partition(".experts")
    return (place, bool(_ONE_BY_ONE.search(name))) if experts else None


def _otherwise(expert: tuple[str, bool]) -> tuple[str, bool]:
    """The same layer's experts stored in the other way."""
    return expert[0], not expert[1]


def _config(subject: Subject, source: Subject) -> Iterator[Finding]:
    differing = []
    for key in _COUNTED:
        said, also = (each.text.get(key, each.config.get(key)) for each in (source, subject))
        wrapped = key == "model_type" and source.text is not source.config and subject.text is subject.config
        if said is not None and said != also and not wrapped:
            differing.append(f"{key} is {shown(also) if also is not None else 'not there'}, there {shown(said)}")
    if differing:
        yield Finding(
            "warning", "changed-config",
            f"config.json says otherwise than that of {source.ckpt.path}: " + "; ".join(differing[:6])
            + (f" and {len(differing) - 6} more" if len(differing) > 6 else "") + ".", (),
            "The same weights make another model, or another number of layers of a head is read.",
            "Take these keys from the original config.json.",
        )  # fmt: skip


def compared(subject: Subject, source: Subject) -> list[tuple[ModulePlan, ModulePlan]]:
    """The modules whose values can be compared, with the source's: those of one name and one shape."""
    there = _by_name(source)
    pairs = ((module, there.get(name)) for name, module in _by_name(subject).items())
    return [(module, other) for module, other in pairs if other is not None and module.shape == other.shape != ()]


def values_findings(
    subject: Subject, source: Subject, progress: Callable[[int], None] | None = None
) -> Iterator[Finding]:
    """Weights that are further from the original's than rounding explains, and those that could not be compared.

    `progress` gets bytes read: those of both modules of `compared`.
    """
    odd: dict[str, float] = {}
    apart: dict[str, list[str]] = {}  # why they could not be compared, in words that many share → which
    reasons: dict[str, str] = {}  # the first of them in full
    for module, original in compared(subject, source):
        try:
            error = _distance(subject, source, module, original)
            if not math.isfinite(error):
                apart.setdefault("hold NaN or infinity, here or there", []).append(module.name)
            elif error > (_FP8_ERROR if "fp8" in (module.weight, original.weight) else _CAST_ERROR):
                odd[module.name] = error
        except CheckpointError as fault:
            apart.setdefault("cannot be read", []).append(module.name)
            reasons.setdefault("cannot be read", f" {fault}")
        if progress is not None:
            progress(module.nbytes + original.nbytes)
    for why, names in apart.items():
        fix = "Download the checkpoint that cannot be read again, and compare anew."
        yield _not_compared("warning", names, source, f"they {why}", reasons.get(why, ""), fix)
    yield from _stored_otherwise(subject, source)
    if odd:
        worst = max(odd, key=lambda name: odd[name])
        yield Finding(
            "error", "values-differ",
            f"{len(odd)} weights differ from {source.ckpt.path} by more than rounding: {listed(list(odd))}; most "
            f"{shown(worst)}, by {odd[worst]:.2g} of its size.", tuple(odd),
            "A scale applied twice or not at all, a shifted norm, a tensor under another's name.", "Convert again.",
        )  # fmt: skip


def _stored_otherwise(subject: Subject, source: Subject) -> Iterator[Finding]:
    """Experts that are stacked in one of the two and stored one by one in the other."""
    here, there = _by_name(subject), _by_name(source)
    experts = set(map(_expert, there))
    names = [
        module.name
        for name, module in here.items()
        if name not in there and (mine := _expert(name)) is not None and _otherwise(mine) in experts
    ]
    if names:
        yield _not_compared("note", names, source, "experts are stacked in one and stored one by one in the other")


def _not_compared(
    severity: str, names: list[str], source: Subject, since: str, reason: str = "", fix: str = ""
) -> Finding:
    """The finding that says which weights were left out of the comparison, and since what."""
    return Finding(
        severity, "not-compared",
        f"{len(names)} weights were not compared with {source.ckpt.path}, since {since}: {listed(names)}.{reason}",
        tuple(names), "Whether the conversion kept their values is not known.", fix,
    )  # fmt: skip


def _distance(subject: Subject, source: Subject, module: ModulePlan, original: ModulePlan) -> float:
    """rms of the difference over the original's rms; NaN or infinity where there are such values.

    Of an original that is all zero, 1 where the other is not. Raises CheckpointError for values that cannot be read.
    """
    import torch

    apart = size = 0.0
    for (_, _, band), (_, _, before) in zip(
        subject.ckpt.bands(module.name), source.ckpt.bands(original.name), strict=True
    ):
        apart += float(torch.dist(band, before)) ** 2
        size += float(torch.linalg.vector_norm(before)) ** 2
    return (apart / size) ** 0.5 if size else float(apart > 0)
