"""What a format description says, and the parsed form of a quantisation config.

Knows no format: each is a file beside this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

__all__ = ["Format", "QuantizationConfig", "Scheme", "SharedScale", "block_sizes", "list_names", "names_listed"]

_MAX_BLOCK = 1 << 20
_ACTIVATION_GROUP = 128  # beside weights in blocks, whatever these measure (DeepSeek-V3, compressed-tensors FP8_BLOCK)
_CODES = {"e4m3": ("F8_E4M3", "F8_E4M3FNUZ"), "e5m2": ("F8_E5M2", "F8_E5M2FNUZ")}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a module share scales, and what becomes of its activations."""

    granularity: str  # "tensor", "channel" (output row), "block", "group" (along a row)
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale; given for "block" and "group" only
    activation: str = "dynamic"  # "dynamic": quantised as they come; "static": by a stored scale; "none": not
    codes: str = "e4m3"
    foreign: str = ""  # set where the config gives the module something that is no FP8: its name
    inputs: str = ""  # what shares a scale of dynamic activations: "token", "group"; "": what goes with the weights
    transposed: bool = False  # stacked experts lie [e, k, n]: a channel is a column

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        """The storage dtypes, as safetensors spells them, that may hold these codes."""
        return _CODES[self.codes]

    @property
    def activation_group(self) -> int:
        """How many columns of a token share a scale where activations are dynamic; 0: all of them."""
        inputs = self.inputs or ("token" if self.granularity in ("tensor", "channel") else "group")
        if inputs == "token":
            return 0
        return self.block[1] if self.granularity == "group" else _ACTIVATION_GROUP

    def __str__(self) -> str:
        bm, bn = self.block
        return {
            "tensor": "a scale per tensor",
            "channel": "a scale per output channel",
            "block": f"a scale per {bm}x{bn} block",
            "group": f"a scale per {bn} columns of a row",
        }[self.granularity]


@dataclass(frozen=True)
class QuantizationConfig:
    """A checkpoint's quantisation config, in one vocabulary for every format."""

    method: str  # quant_method as it stands
    where: str  # file and key path
    scheme_of: Callable[[str], Scheme | None]  # by module name; None where the config gives it no weight scheme
    exclusions: tuple[str, ...] = ()  # modules kept in high precision, as listed
    exclusions_key: str = "modules_to_not_convert"
    kv_cache: str | None = None  # what the KV cache is to be quantised to, in the config's own words
    exclusions_to_end: bool = True  # what a pattern among the exclusions matches ends at a dot or the name's end


class SharedScale(NamedTuple):
    """A weight's scale as a part of a tensor that holds those of several: `part` is (start, stop) by axis."""

    scale: TensorInfo
    part: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Format:
    """One layout of quantised weights: everything the readers need to know of it.

    A weight `stem + pair[0]` has its scale in `stem + pair[1]`, the first of `pairs` for which there is one; the
    tensor is always the multiplier. A pair whose weight ends in nothing is one of stacked experts.
    """

    name: str
    methods: tuple[str, ...]  # quant_method strings it answers to
    pairs: tuple[tuple[str, str], ...]
    parse: Callable[[dict[str, Any], str], QuantizationConfig]
    shared_scale: Callable[[TensorInfo, Mapping[str, TensorInfo], Scheme], SharedScale | None] | None = None
    values_suffix: str = ".weight"  # how a weight's values are called, where its codes are called otherwise
    # where the config lists what is kept out of FP8: all keys that are read, the one to write first
    list_keys: tuple[str, ...] = ("modules_to_not_convert",)
    # (content, names, add): writes them into a content of its own, where that takes more than a list under a key
    write_list: Callable[[dict[str, Any], Sequence[str], bool], None] | None = None
    can_keep_more: bool = True  # whether files of it may hold modules unquantised that it had in FP8

    def with_list(self, content: Mapping[str, Any], names: Sequence[str], add: bool = False) -> dict[str, Any]:
        """A copy of a quantisation config whose list of what is kept out of FP8 is `names`, whichever keys it had.

        `add`: they come beside those listed, being modules, by full name, that are not FP8 any more.
        """
        made = copy.deepcopy(dict(content))
        if self.write_list is not None:
            self.write_list(made, names, add)
        else:
            list_names(made, self.list_keys, names, add)
        return made


def block_sizes(value: Any, where: str, key: str) -> tuple[int, int]:
    """`value` as (bm, bn). Raises CheckpointError for anything but two positive whole numbers."""
    if isinstance(value, str):  # old compressed-tensors: "128x128"
        value = [int(size) if size.isdecimal() and len(size) < 8 else size for size in value.split("x")]
    if not (isinstance(value, list) and len(value) == 2 and all(type(b) is int and 0 < b <= _MAX_BLOCK for b in value)):
        raise CheckpointError(f"{where}: {key} {shown(value)}, expected two positive whole numbers, like [128, 128].")
    return value[0], value[1]


def names_listed(content: Mapping[str, Any], keys: tuple[str, ...], where: str) -> tuple[tuple[str, ...], str]:
    """(module names under any of `keys`, the key that had some). Raises CheckpointError for what is no list of them."""
    entries: list[str] = []
    used = keys[0]
    for key in keys:
        listed = content.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise CheckpointError(f"{where}: {key}, expected a list of module names, found {shown(listed)}.")
        used = key if not entries else used
        entries += listed
    return tuple(dict.fromkeys(entries)), used


def list_names(content: dict[str, Any], keys: Sequence[str], names: Sequence[str], add: bool) -> None:
    """Write `names` into `content` under those of `keys` that list some, whichever its readers prefer, else one key."""
    listing = [key for key in keys if content.get(key)]
    for key in listing or [next((key for key in keys if key in content), keys[0])]:
        before = content.get(key) if add else None
        content[key] = list(dict.fromkeys([*(before or []), *names]))
