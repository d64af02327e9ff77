"""Numbers, flags and lists of a parsed config.json, each checked as it is read.

Knows no family: it says of any key what was found and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from mtplab.checkpoint.config_json import stored_dtype, text_config
from mtplab.config import DTYPES, MAX_DEPTH
from mtplab.errors import CheckpointError
from mtplab.models.spec import Llama3, Yarn

__all__ = ["Fields", "yarn_mscale"]


class Fields:
    """A config.json's text part: its own, or the one under `text_config` of a multimodal wrapper.

    `names`: the tensors on disk, for what a family's config.json leaves to them; None where they are not known.
    """

    def __init__(self, config: dict[str, Any], file: object = "config.json", names: Collection[str] | None = None):
        self.whole, self.file, self.names = config, file, names
        self.text: dict[str, Any] = text_config(config)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """What to raise where a key holds what cannot be."""
        value = self.text.get(key)
        found = str(value).lower() if isinstance(value, bool) else f"{value!r:.60}"
        return CheckpointError(f"{self.file}: {key} is {found}; expected {expected}")

    def number(self, key: str, default: int | None = None, top: float = 2**40) -> int:
        """A positive whole number, at most `top`."""
        return _number(self.file, self.text, key, default, int, top)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        return _number(self.file, self.text, key, default, float)

    def count(self, key: str, default: int = 0, top: int = 2**40) -> int:
        """A whole number that may be 0."""
        value = self.text.get(key)
        return default if value is None else 0 if value == 0 and type(value) is int else self.number(key, top=top)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.text.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def must_be(self, key: str, wanted: Any, why: str) -> None:
        """A setting that would change the arithmetic, and the only value that it is written for."""
        if self.text.get(key, wanted) != wanted or type(self.text.get(key, wanted)) is not type(wanted):
            shown = str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
            raise self.wrong(key, f"{shown}: {why}")

    def kinds(self, key: str, count: int, known: tuple[str, ...]) -> list[str] | None:
        """A list of one name a layer, out of `known`; None where the key is not there."""
        if self.text.get(key) is None:
            return None
        kinds = self.expect(key, list)
        if len(kinds) != count or any(kind not in known for kind in kinds):
            raise CheckpointError(
                f"{self.file}: {key} has {len(kinds)} entries, {sorted({str(k)[:40] for k in kinds})}; "
                f"expected {count} entries (num_hidden_layers), each {' or '.join(known)}"
            )
        return kinds

    def by_layer(self, key: str, count: int, default: Any = None) -> list[Any]:
        """One value for each of `count` layers: of a list its first, else the one that there is, or the default."""
        value = self.text.get(key)
        value = default if value is None else value
        if isinstance(value, list) and len(value) < count:
            raise CheckpointError(
                f"{self.file}: {key} has {len(value)} entries; expected {count}, one for each layer, the head's behind "
                "the target's"
            )
        return value[:count] if isinstance(value, list) else [value] * count

    def reals_by_layer(self, key: str, count: int, default: float | None, top: float = 2**40) -> list[float | None]:
        """Positive numbers likewise; where the default is None, null and 0 stand for none."""
        return [
            None if default is None and not value else _number(self.file, {key: value}, key, None, float, top)
            for value in self.by_layer(key, count, default)
        ]

    def expect(self, key: str, kind: type) -> Any:
        """A value of this JSON kind."""
        if not isinstance(self.text[key], kind):
            raise self.wrong(key, f"a JSON {kind.__name__}")
        return self.text[key]

    def rope(self, factor: float = 1.0) -> tuple[float, float, dict[str, Any]]:
        """(base of the rotation's frequencies, share of a head's features that turn, all that config.json says of it).
        `factor`: the share where it says none."""
        key = "rope_parameters" if self.text.get("rope_parameters") is not None else "rope_scaling"
        rope = self.expect(key, dict) if self.text.get(key) is not None else {}
        rope = {name: self.text[name] for name in ("partial_rotary_factor", "rope_theta") if name in self.text} | rope
        theta = _number(self.file, rope, "rope_theta", 10000.0, float)
        return theta, _number(self.file, rope, "partial_rotary_factor", factor, float, top=1), rope

    def plain_rope(self, rope: dict[str, Any]) -> None:
        """Raises CheckpointError for frequencies that are scaled."""
        self.rope_type(rope, "default")

    def rope_type(self, rope: dict[str, Any], *known: str) -> str:
        """How frequencies are scaled, which must be one of these; older files call it `type`."""
        found = rope.get("rope_type", rope.get("type", "default"))
        # positions in an image's rows and columns, which are the same number for text
        found = "default" if found == "mrope" else found
        if found not in known:
            raise CheckpointError(
                f"{self.file}: rope_type is {found!r:.60}; expected {' or '.join(map(repr, known))}"
            )
        return found

    def rope_number(self, rope: dict[str, Any], key: str, default: float) -> float:
        """A positive number of `rope`; the default where there is none, or 0."""
        return _number(self.file, rope, key, None, float) if rope.get(key) else default

    def llama3(self, rope: dict[str, Any]) -> Llama3:
        """Numbers of Llama 3.1's scaling, none of which has a default."""
        factor, low, high = (
            _number(self.file, rope, key, None, float) for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        if low >= high:
            raise CheckpointError(
                f"{self.file}: low_freq_factor is {low} and high_freq_factor {high}; expected less and more"
            )
        return Llama3(factor, _number(self.file, rope, "original_max_position_embeddings"), low, high)

    def yarn(self, rope: dict[str, Any]) -> Yarn:
        """YaRN's numbers, with transformers' defaults (`_compute_yarn_parameters`)."""
        original = _number(self.file, rope, "original_max_position_embeddings")
        theta = _number(self.file, rope, "rope_theta", 10000.0, float)
        if theta <= 1:
            raise CheckpointError(f"{self.file}: rope_theta is {theta}; expected more than 1 with yarn")
        factor = self.rope_number(rope, "factor", self.number("max_position_embeddings", 32768) / original)
        most, every = self.rope_number(rope, "mscale", 0.0), self.rope_number(rope, "mscale_all_dim", 0.0)
        attention = yarn_mscale(factor, most) / yarn_mscale(factor, every) if most and every else yarn_mscale(factor)
        fast, slow = self.rope_number(rope, "beta_fast", 32.0), self.rope_number(rope, "beta_slow", 1.0)
        truncate = rope.get("truncate", True)
        if min(fast, slow) < 1e-6 or not isinstance(truncate, bool):
            raise CheckpointError(
                f"{self.file}: beta_fast is {fast}, beta_slow {slow} and truncate {truncate!r:.60}; expected turns of "
                "at least 1e-6, and true or false"
            )
        return Yarn(factor, original, fast, slow, self.rope_number(rope, "attention_factor", attention), truncate)

    def turned(self, head_dim: int, share: float) -> int:
        """How many of a head's features turn."""
        found = int(head_dim * share)
        if found % 2 or found == 0:
            raise CheckpointError(
                f"{self.file}: partial_rotary_factor turns {found} of {head_dim} features; expected an even number"
            )
        return found

    def multiples(self, *pairs: tuple[str, int, int]) -> None:
        """Of each (key, many, few): many must be a multiple of few, the key heads it shares."""
        for name, many, few in pairs:
            if many % few:
                raise CheckpointError(f"{self.file}: {name} is {many}; expected a multiple of {few}, its key heads")

    def head_layers(self, key: str) -> int:
        """How many layers the MTP head has, by this key."""
        value = self.text.get(key) or 0
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_DEPTH:
            raise self.wrong(
                key, f"a whole number from 0 to {MAX_DEPTH}: the layers of the MTP head, 1 in published checkpoints"
            )
        return value

    def eos(self, override: Any, override_file: object, vocabulary: int) -> tuple[int, ...]:
        """Ids that end a text; `override` from another file wins unless it is None."""
        eos = override if override is not None else self.text.get("eos_token_id", self.whole.get("eos_token_id"))
        ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary for i in ids):
            raise CheckpointError(
                f"{self.file if override is None else override_file}: eos_token_id is {eos!r:.60}; "
                f"expected an id from 0 to {vocabulary - 1}, or a list of ids"
            )
        return ids

    def dtype(self) -> str:
        """What the checkpoint is written for."""
        dtype = stored_dtype(self.whole)
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.file}: dtype is {dtype!r:.60}; expected one of {', '.join(DTYPES)}")
        return dtype

    def tied(self) -> bool:
        """Whether the vocabulary head shares the embedding's weight."""
        tied = self.text.get("tie_word_embeddings", self.whole.get("tie_word_embeddings", False))
        if not isinstance(tied, bool):
            raise CheckpointError(f"{self.file}: tie_word_embeddings is {tied!r:.60}; expected true or false")
        return tied


def yarn_mscale(factor: float, share: float = 1.0) -> float:
    """What YaRN multiplies attention by at this factor (arXiv 2309.00071, equation 22; `share` is DeepSeek's)."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _number(
    file: object, found: dict, key: str, default: float | None = None, kind: type = int, top: float = 2**40
) -> Any:
    """A positive number of this kind, at most `top`."""
    value = found.get(key, default)
    wanted = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, wanted) or not 0 < value <= top:
        said = "is missing" if value is None else f"is {value!r:.60}"
        raise CheckpointError(f"{file}: {key} {said}; expected a positive {kind.__name__} of at most {top:g}")
    return kind(value)
