"""compressed-tensors (llm-compressor): groups of modules, each with its own strategy.

`X.weight` F8_E4M3; `X.weight_scale` [1] (tensor), [n, 1] (channel), [ceil, ceil] (block), or U8 [n, k/32] for MXFP8.
A target is a full name, `re:` and a pattern matched from the name's start, or a class name; the first that fits
counts, in this order (compressed_tensors.utils.match). Without classes, `Linear` and its kin stand for every module,
and any other class name does where there is no `Linear`.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, block_sizes, names_listed
from mtplab.checkpoint.formats.by_module import ByModule
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

_LISTS = ("ignore",)
_STRATEGIES = {"tensor": "tensor", "channel": "channel", "block": "block", "group": "group"}


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    groups = content.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{where}: config_groups, expected an object of groups, found {shown(groups)}.")
    names: dict[str, Scheme] = {}
    patterns: list[tuple[str, Scheme]] = []
    classes: list[tuple[str, Scheme]] = []
    for label, group in groups.items():
        scheme = _scheme(group, content.get("format"), f"{where}: config_groups.{shown(label)}")
        for target in names_listed(group, ("targets",), f"{where}: config_groups.{shown(label)}")[0]:
            if target.startswith("re:"):
                patterns.append((target, scheme))
            elif "." in target or not target[:1].isupper():
                names.setdefault(target, scheme)
            else:
                classes.append((target.lower(), scheme))
    schemes = [*names.values(), *(scheme for _, scheme in (*patterns, *classes))]
    if schemes and all(scheme.foreign for scheme in schemes):
        raise CheckpointError(
            f"{where}: compressed-tensors with {schemes[0].foreign}, expected FP8: 8-bit floats. Take the checkpoint's "
            "BF16 or FP8 release."
        )
    classes.sort(key=lambda item: "linear" not in item[0])
    scheme_of = ByModule(where, names, patterns, classes[0][1] if classes else None)
    entries, key = names_listed(content, _LISTS, where)
    kv = content.get("kv_cache_scheme")
    said = shown({k: kv.get(k) for k in ("num_bits", "type", "strategy")}) if isinstance(kv, dict) else None
    # `re:.*gate` covers gate_proj too (re.match)
    return QuantizationConfig("compressed-tensors", where, scheme_of, entries, key, said, False)


def _scheme(group: dict[str, Any], overall: Any, where: str) -> Scheme:
    weights = group.get("weights")
    layout = group.get("format") or overall
    if weights is None:
        return Scheme("tensor", foreign="no weight quantisation")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: weights, expected an object, found {shown(weights)}.")
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    if (bits, kind) != (8, "float"):
        return Scheme("tensor", foreign=f"{shown(layout)}: {shown(bits)} bits of type {shown(kind)}")
    inputs = group.get("input_activations")
    dynamic = inputs.get("dynamic") if isinstance(inputs, dict) else None
    activation = "none" if inputs is None else "dynamic" if dynamic else "static"
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise CheckpointError(f"{where}: strategy {shown(strategy)}, expected one of {', '.join(_STRATEGIES)}.")
    said = inputs.get("strategy") if isinstance(inputs, dict) else None
    block = (0, 0)
    if strategy == "block":
        block = block_sizes(weights.get("block_structure"), where, "block_structure")
    elif strategy == "group":
        block = block_sizes([1, weights.get("group_size")], where, "[1, group_size]")
    return Scheme(_STRATEGIES[strategy], block, activation, inputs=str(said) if said in ("token", "group") else "")


FORMAT = Format(
    name="compressed-tensors",
    methods=("compressed-tensors",),
    pairs=((".weight", ".weight_scale"), ("", "_weight_scale"), ("", "_scale")),
    parse=_parse,
    list_keys=_LISTS,
)
