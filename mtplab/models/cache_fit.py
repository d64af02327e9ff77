"""Whether a model's KV caches can be kept under a policy: from config.json and headers, before anything is loaded.

Reads no values and imports no torch, so that a sweep is refused while it is planned. Knows nothing of codes or passes.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtplab.checkpoint import Checkpoint
from mtplab.errors import CheckpointError, ConfigError
from mtplab.models.config import ROOTS, roots_of
from mtplab.models.families import family_of
from mtplab.models.spec import ModelConfig
from mtplab.quant.policy import QuantPolicy, resolve_policy

__all__ = ["check_cache", "check_policy", "fitting", "scale_names"]

# of K and V: compressed-tensors and ModelOpt, Quark and old compressed-tensors, AutoFP8's one for both
_ENDINGS = (
    (".k_scale", ".k_proj.output_scale", ".kv_scale"),
    (".v_scale", ".v_proj.output_scale", ".kv_scale"),
)


def check_cache(checkpoint: Checkpoint, config: ModelConfig, policy: QuantPolicy, part: str = "target") -> None:
    """`check_policy`, and that the file has the scales which the policy takes from it. Raises ConfigError, or
    CheckpointError for two scales of one cache."""
    check_policy(config, policy, part)
    for which, side in enumerate(policy.sides[:1] if config.one_row else policy.sides):
        if side.scales == "checkpoint":
            scale_names(checkpoint, config, policy, part, which)


def check_policy(config: ModelConfig, policy: QuantPolicy, part: str = "target") -> None:
    """Raises ConfigError where such a model's cache cannot be kept so, of the "target" or the "draft"."""
    layers = config.layers if part == "target" else config.draft_layers
    if config.one_row and policy.k != policy.v:
        raise ConfigError(
            f"quant_policy {policy.name} stores K and V differently, but this model's cache keeps one row of a token "
            "that is both (multi-head latent attention); use int8, int4, fp8_e4m3, fp8_e5m2 or none"
        )
    for dim in sorted({each.rows.dim for each in layers if each.rows is not None}):
        for side in policy.sides:
            side.storage.check_head_dim(dim)
    if policy.kept and part != "target":
        raise ConfigError(
            f"the draft's quant_policy is {policy.name}, which names layers of the target; use "
            f"{policy.everywhere.name} or none"
        )
    attention = list(config.attention)
    wrong = [layer for layer in policy.kept if layer not in attention]
    if wrong:
        raise ConfigError(
            f"quant_policy {policy.name:.60} keeps layer{'s' * (len(wrong) > 1)} {_some(wrong)} unquantised, which "
            f"{'have' if len(wrong) > 1 else 'has'} no KV cache here; expected some of {_some(attention)}, the "
            "target's attention layers"
        )


def fitting(config: ModelConfig, policies: Iterable[str]) -> list[str]:
    """Those of the policies under which such a model's caches can be kept, the target's and the draft's."""
    found = []
    for name in policies:
        try:
            for part in ("target", "draft"):
                check_policy(config, resolve_policy(name), part)
        except ConfigError:
            continue
        found.append(name)
    return found


def _some(numbers: list[int], most: int = 32) -> str:
    return ", ".join(map(str, numbers[:most])) + ", …" * (len(numbers) > most)


def scale_names(
    checkpoint: Checkpoint, config: ModelConfig, policy: QuantPolicy, part: str, which: int
) -> dict[int, str]:
    """Layer → the file's tensor that scales its K (`which` 0) or V (1), for every layer that the policy quantises.

    Raises ConfigError naming the layers without one, CheckpointError for a layer with two.
    """
    stored, layers = checkpoint.kv_scales(), _attention_layers(checkpoint, config, policy, part)
    found: dict[int, str] = {}
    for layer, name in layers.items():
        mine = [each for each in stored if each.startswith(f"{name}.") and each.endswith(_ENDINGS[which])]
        if len(mine) > 1:
            raise CheckpointError(f"{checkpoint.path}: {' and '.join(mine)} both scale one cache; expected one")
        if mine:
            found[layer] = mine[0]
    missing = [name for layer, name in layers.items() if layer not in found]
    if missing:
        head = " (the draft head; give it a draft_quant_policy of its own)" if part != "target" else ""
        raise ConfigError(
            f"quant_policy {policy.name} wants the checkpoint's own scales, but {checkpoint.path} has no "
            f"{'kv'[which]}_scale for {len(missing)} of {len(layers)} attention layers: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}{head}; use fp8_e4m3:calibrated, or fp8_e4m3 for scale 1"
        )
    return found


def _attention_layers(
    checkpoint: Checkpoint, config: ModelConfig, policy: QuantPolicy, part: str
) -> dict[int, str]:
    """Number → name on disk of the layers whose KV cache the policy quantises."""
    if part != "target":
        layout = family_of(checkpoint.config)[0].layout
        names = (layout.names(each.number, config.num_layers, _root(checkpoint)) for each in config.draft_layers)
        return {i: f"{each.block}self_attn" for i, each in enumerate(names)}
    root = _root(checkpoint)
    return {i: f"{root}layers.{i}.self_attn" for i in config.attention if i not in policy.kept}


def _root(checkpoint: Checkpoint) -> str:
    return next(iter(roots_of(checkpoint.tensors)), ROOTS[0])
