"""What becomes of every module: its weight's dtype, whether its activations are rounded, and which rule
decided.

Decides from headers, names and settings; knows nothing of values, layers or devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mtplab.checkpoint.exclusions import PUBLISHED, ListedModules, UserPatterns, parse_exclude
from mtplab.checkpoint.experts import stacked_parts
from mtplab.checkpoint.formats import QuantizationConfig, Scheme
from mtplab.checkpoint.header import DTYPE_BITS, PLAIN_FLOATS, TensorInfo
from mtplab.checkpoint.names import Reach, draft_prefixes, kind_of, module_of, nearest, part_of
from mtplab.checkpoint.pairing import Pairing
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError, ConfigError

__all__ = ["LOAD_BLOCK", "MODEL_FORMATS", "ModulePlan", "Plan", "make_plan"]

MODEL_FORMATS = (None, "fp8")
LOAD_BLOCK = (128, 128)  # of weights that are quantised as they are loaded
_PART_ORDER = {"embedding": 0, "target": 1, "head": 2, "draft": 3, "unused": 4}


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One module: `weight` and `activation` are what a run uses, `stored` and `nbytes` what is on disk."""

    name: str  # as it stands on disk, without ".weight"
    part: str  # "target", "draft", "embedding", "head"; "unused": no run loads it
    kind: str  # "linear", "experts" (stacked linear weights [e, n, k]), "norm", "conv", "embedding", "other"
    stored: str  # storage dtype of the weight, as safetensors spells it
    weight: str  # "fp8", "bf16", "f16", "f32"; any other storage dtype in lower case; "unusable"
    activation: str  # "fp8": rounded to FP8 before the product; "none"
    rule: str  # one sentence: what decided
    shape: tuple[int, ...]
    nbytes: int  # as stored, scale and bias included
    scale: TensorInfo | None = None
    block: tuple[int, ...] | None = None  # (bm, bn) where weight is "fp8"; with the experts' axis before if stacked
    # of activations that are rounded as they come: columns of a token that share a scale, 0 for all of them
    activation_group: int = LOAD_BLOCK[1]
    input_scale: TensorInfo | None = None  # the one scale of activations that are rounded by a stored one

    @property
    def multiplies(self) -> bool:
        """Whether its weight is that of matrix products, one or one for each expert."""
        return self.kind in ("linear", "experts")

    @property
    def loaded_nbytes(self) -> int:
        """Bytes with `weight` as planned: codes, float32 scales and a bias where quantised at load; 0 if unused."""
        if self.part == "unused":
            return 0
        if self.weight != "fp8" or self.block is None or self.scale is not None:
            return self.nbytes
        grid = (-(-size // block) for size, block in zip(self.shape, self.block, strict=True))
        weight = math.prod(self.shape)
        beside = self.nbytes - weight * DTYPE_BITS[self.stored] // 8  # a bias stays as it is stored
        return weight + 4 * math.prod(grid) + beside


@dataclass(frozen=True, repr=False)
class Plan:
    """The modules of a checkpoint in reading order: embedding, target, head, draft, and what no run loads.

    `warnings` are sentences on what the checkpoint says of itself and its tensors do not bear out.
    """

    modules: tuple[ModulePlan, ...]
    model_format: str | None = None
    warnings: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, ModulePlan]:
        """Every module by its name on disk."""
        return {module.name: module for module in self.modules}

    def nbytes(self, part: str | None = None) -> int:
        """Bytes as stored, of one part ("target", "draft", "embedding", "head", "unused") or of all."""
        return sum(module.nbytes for module in self._of(part))

    def loaded_nbytes(self, part: str | None = None) -> int:
        """Bytes with every weight in the dtype the plan gives it, of one part or of all."""
        return sum(module.loaded_nbytes for module in self._of(part))

    def _of(self, part: str | None) -> Iterable[ModulePlan]:
        if part is not None and part not in _PART_ORDER:
            raise ConfigError(f"part={part!r}: expected one of {', '.join(_PART_ORDER)}, or None for all.")
        return (module for module in self.modules if part in (None, module.part))

    def __repr__(self) -> str:
        fp8 = sum(module.weight == "fp8" for module in self.modules)
        warned = f", {len(self.warnings)} warning{'s' if len(self.warnings) > 1 else ''}" if self.warnings else ""
        return f"Plan({len(self.modules)} modules, {fp8} in FP8, {self.loaded_nbytes():,} bytes as planned{warned})"

    def __str__(self) -> str:
        from mtplab.checkpoint.plan_table import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from mtplab.checkpoint.plan_table import as_html

        return as_html(self)


def make_plan(
    tensors: Mapping[str, TensorInfo],
    config: dict[str, Any],
    pairing: Pairing,
    quantization: QuantizationConfig | None,
    *,
    exclude: str | Sequence[str] | None = None,
    draft_exclude: str | Sequence[str] | None = None,
    model_format: str | None = None,
    warnings: tuple[str, ...] = (),
    faulty: bool = False,
) -> Plan:
    """Decide every module. Settings as in `Checkpoint.plan`; pairs of weight and scale are taken as checked.

    `faulty`: a module whose pair is at fault is planned too, as "unusable", with the fault for a rule.

    Raises ConfigError for an unknown setting, a pattern that covers no module or exclusions where nothing is FP8,
    CheckpointError for a pattern of the checkpoint's own list that cannot be run.
    """
    if model_format not in MODEL_FORMATS:
        raise ConfigError(f"model_format={model_format!r}: expected None (as stored) or 'fp8'.")
    wanted = parse_exclude(exclude)
    wanted_draft = wanted if draft_exclude is None else parse_exclude(draft_exclude, "draft_exclude")
    grouped = _group(tensors, pairing)
    published = PUBLISHED if quantization is None else ()
    target, draft = UserPatterns(wanted, published), UserPatterns(wanted_draft, published)
    target.check(list(grouped), "exclude")
    if draft_exclude is not None:
        draft.check(list(grouped), "draft_exclude")
    if quantization is None and model_format is None:
        _refuse_in_vain({"exclude": wanted, "draft_exclude": wanted_draft})
    decide = _Decision(config, pairing, quantization, model_format, faulty)
    drafts, reach = draft_prefixes(config), Reach(config)
    modules = []
    for name, members in grouped.items():
        part, why = part_of(name, drafts), reach.unread(name)
        if why is None:
            modules.append(decide(name, part, members, draft if part == "draft" else target))
        else:
            modules.append(decide.unused(name, members, why))
    modules.sort(key=lambda module: (_PART_ORDER[module.part], _natural(module.name)))
    return Plan(tuple(modules), model_format, (*warnings, *decide.warnings(list(grouped))))


def _refuse_in_vain(asked: Mapping[str, tuple[str, ...] | None]) -> None:
    """An exclusion list with nothing to exclude from would quietly do nothing, and "none" would not mean all FP8."""
    for option, items in asked.items():
        if items not in (None, ("published",)):
            raise ConfigError(
                f"{option} is {list(items)}, but the checkpoint is not quantised and nothing would be kept from FP8: "
                f"add model_format='fp8', or leave {option} out."
            )


def _group(tensors: Mapping[str, TensorInfo], pairing: Pairing) -> dict[str, list[TensorInfo]]:
    """Tensors by module, the weight first; scales are left out, their weights bring them."""
    grouped: dict[str, list[TensorInfo]] = {}
    codes = {stored: name for name, stored in pairing.weight_names().items()}
    for info in tensors.values():
        if not pairing.is_scale(info.name):
            name = codes.get(info.name, info.name)
            scaled = pairing.module_scaled_at_input(name)  # whose its bytes are
            members = grouped.setdefault(module_of(name) if scaled is None else scaled, [])
            members.insert(0 if info.name in codes or info.name.endswith(".weight") else len(members), info)
    return grouped


_NUMBERS = re.compile(r"([0-9]{1,18})")


def _natural(name: str) -> list[Any]:
    """Sort key under which layer 2 stands before layer 10: text and numbers by turns."""
    pieces: list[Any] = _NUMBERS.split(name)
    pieces[1::2] = map(int, pieces[1::2])
    return pieces


class _Decision:
    def __init__(
        self,
        config: dict[str, Any],
        pairing: Pairing,
        quantization: QuantizationConfig | None,
        model_format: str | None,
        faulty: bool,
    ) -> None:
        self._config, self._pairing = config, pairing
        self._faulty = faulty
        self._quantization = quantization
        self._at_load = model_format == "fp8" and quantization is None
        self._asked_in_vain = model_format == "fp8" and quantization is not None
        listed = quantization.exclusions if quantization is not None else ()
        self._where = quantization.where if quantization is not None else ""
        to_end = quantization is None or quantization.exclusions_to_end
        self._listed = ListedModules(listed, self._where, to_end)
        self._listed_as_fp8: list[str] = []
        self._key = quantization.exclusions_key if quantization is not None else ""

    def __call__(self, name: str, part: str, members: list[TensorInfo], user: UserPatterns) -> ModulePlan:
        info = members[0]
        kind = kind_of(name, len(info.shape))
        quantised = self._pairing.is_quantised(info)
        if stacked_parts(info, self._config):
            kind = "experts"
        elif kind == "linear" and not (quantised or info.name.endswith(".weight")):
            kind = "other"  # a table or a parameter of a layout that is not read as linear weights
        scale = self._pairing.scale_of(info.name)
        nbytes = sum(member.nbytes for member in members) + (scale.nbytes if scale is not None else 0)
        block: tuple[int, ...] | None = None
        group, input_scale = LOAD_BLOCK[1], None
        if quantised:
            try:
                pair = self._pairing.pair(info)
            except CheckpointError as error:
                if not self._faulty:
                    raise
                weight, activation, rule = "unusable", "none", str(error)
            else:
                weight, block, scale = "fp8", pair.block, pair.scale
                if pair.part:  # its own share of what holds the scales of several
                    share = math.prod(stop - start for start, stop in pair.part)
                    nbytes += pair.scale.nbytes * share // math.prod(pair.scale.shape)
                if pair.scheme.activation == "static":
                    input_scale = self._pairing.input_scale_of(name)
                group = pair.scheme.activation_group
                activation, rule = self._stored_fp8(name, pair.scheme, user, input_scale)
        elif self._faulty and (fault := self._pairing.packed_fault(info)) is not None:
            scale, weight, activation, rule = None, "unusable", "none", fault
        else:
            scale = None
            weight, activation = PLAIN_FLOATS.get(info.dtype, info.dtype.lower()), "none"
            if self._at_load:
                quantise, rule = self._loaded(name, kind, info, user)
                if quantise:
                    weight, activation = "fp8", "fp8"
                    block = LOAD_BLOCK if kind == "linear" else (1, *LOAD_BLOCK)
            else:
                rule = self._stored_plain(name, kind, info)
        return ModulePlan(
            name, part, kind, info.dtype, weight, activation, rule, info.shape, nbytes, scale, block, group, input_scale
        )

    def unused(self, name: str, members: list[TensorInfo], why: str) -> ModulePlan:
        """The plan of a module that no run loads: it stays as it is stored."""
        made = self(name, "unused", members, UserPatterns(("none",), ()))
        if made.scale is None and made.weight == "fp8":
            made = replace(made, weight=PLAIN_FLOATS[made.stored], block=None)
        return replace(made, activation="none", input_scale=None, rule=f"{why}: not loaded")

    def warnings(self, modules: list[str]) -> list[str]:
        """What the checkpoint's own list says that its tensors do not bear out."""
        found = []
        if self._listed_as_fp8:
            found.append(
                f"{self._where}: {self._key} lists {len(self._listed_as_fp8)} modules that are stored as FP8 with a "
                f"scale, {shown(self._listed_as_fp8[0])} first: an engine that builds them in BF16 reads raw codes"
            )
        # a tied head has no tensor of its own, and every published list names it
        idle = [entry for entry in self._listed.unmatched(modules) if not entry.endswith("lm_head")]
        if idle:
            near = nearest(idle[0], modules, 1)
            hint = f" (nearest to the first: {shown(near[0])})" if near else ""
            found.append(
                f"{self._where}: {len(idle)} entries of {self._key} name no module of this checkpoint: "
                f"{', '.join(map(shown, idle[:4]))}{hint}"
            )
        return found

    def _stored_fp8(
        self, name: str, scheme: Scheme, user: UserPatterns, input_scale: TensorInfo | None
    ) -> tuple[str, str]:
        own = user.own_pattern(name)
        if own is not None:
            return "none", (
                f"excluded by {shown(own)}: its stored FP8 values stay, since what they lost cannot be brought back; "
                "only its activations are no longer rounded"
            )
        entry = self._listed.entry_for(name)
        if entry is not None:
            self._listed_as_fp8.append(name)
            rule = (
                f"stored as FP8 with a scale although {self._key} lists {shown(entry)}: the tensors count, used as FP8"
            )
        else:
            rule = f"stored as FP8 with {scheme} and not excluded: used as FP8"
        activation = "none" if scheme.activation == "none" else "fp8"
        if activation == "none":
            rule += "; the config gives activations no FP8"
        elif input_scale is not None:
            rule += "; activations by the scale stored for them"
        elif scheme.activation == "static":
            rule += "; activations are to have a stored scale, but there is none: rounded as they come"
        elif not scheme.activation_group:
            rule += "; activations with a scale per token"
        vain = "; model_format='fp8' changes nothing, it is FP8 already" if self._asked_in_vain else ""
        return activation, rule + vain

    def _stored_plain(self, name: str, kind: str, info: TensorInfo) -> str:
        if self._quantization is None:
            return f"stored as {info.dtype} in a checkpoint that is not quantised: used as stored"
        entry = self._listed.entry_for(name)
        junk = "; the scale beside it is ignored" if self._pairing.scale_of(info.name) is not None else ""
        vain = "; model_format='fp8' does not quantise what an FP8 checkpoint left out" if self._asked_in_vain else ""
        if entry is not None:
            return f"{self._key} lists {shown(entry)}: kept in {info.dtype} as stored{junk}{vain}"
        if kind in ("linear", "experts"):
            return f"stored as {info.dtype} though {self._key} does not list it: the tensors count{junk}{vain}"
        return f"stored as {info.dtype}: only linear weights are quantised{junk}"

    def _loaded(self, name: str, kind: str, info: TensorInfo, user: UserPatterns) -> tuple[bool, str]:
        if kind not in ("linear", "experts") or info.dtype not in PLAIN_FLOATS:
            return False, f"stored as {info.dtype}: only linear weights are quantised as they are loaded"
        own = user.own_pattern(name)
        if own is not None:
            return False, f"excluded by {shown(own)}: kept in {info.dtype} as stored"
        preset = user.published_pattern(name)
        if preset is not None:
            return False, f"excluded by {preset!r} of the published preset: kept in {info.dtype} as stored"
        bm, bn = LOAD_BLOCK
        return (
            True,
            f"model_format='fp8' and not excluded: quantised from {info.dtype} in {bm}x{bn} blocks at load",
        )
