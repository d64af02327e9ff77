"""SGLang as read in its 0.5.23 wheel: which list it takes for each method, how it matches, what it names modules.

Only data, and the few refusals that its config classes make; matching is in `matching.py`.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.lenses.base import SILENT, UNKNOWN, Consequence, Engine, Family, Fixed, Method
from mtplab.checkpoint.lenses.fused import GDN, MLA, QKV_AND_MLP
from mtplab.checkpoint.strict_json import shown

__all__ = ["SGLANG"]

_LAYERS = "sglang/srt/layers/quantization"
_ROUTER = Fixed(r"\.mlp\.gate$", "plain", "the router is never given a quantisation config (models/qwen2_moe.py)")
_GATE = Fixed(r"\.shared_expert_gate$", "plain", "the shared expert's gate is never given a quantisation config")
_FC = Fixed(r"^mtp\.fc$", "plain", "mtp.fc is a plain torch Linear (models/qwen3_5_mtp.py, qwen3_next_mtp.py)")
_FP4_DRAFT = Fixed(
    r"^mtp\.", "plain", "the MTP head is built unquantised under NVFP4 (models/qwen3_5_mtp.py)", ("modelopt fp4",)
)
_QUARK_DRAFT = Fixed(
    r"^mtp\.", "unknown", "whether the MTP head is built quantised goes by its experts' entries", ("quark",)
)
_VISION = Fixed(r"^(model\.)?visual\.", "unknown", "the vision tower's names were not looked at")
_INDEXER = Fixed(r"\.indexer\.", "unknown", "the indexer's projections are built in ways not looked at here")
_DRAFT = Fixed("", "unknown", "the draft's names in this family were not looked at", parts=("draft",))


def _modelopt(content: dict[str, Any]) -> str | None:
    inner = content.get("quantization")
    algorithm = content.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
    if algorithm is None:
        return "quant_algo is missing"
    if str(algorithm) == "FP8" or any(word in str(algorithm).upper() for word in ("FP4", "MXFP8")):
        return None
    return f"quant_algo {shown(algorithm)}; of 8 bits its ModelOpt class reads only FP8"


def _auto_round(content: dict[str, Any]) -> str | None:
    kind = content.get("data_type", "int")
    return None if kind == "int" else f"data_type {shown(kind)}; of auto-round it reads integers only"


def _both_roots(entries: list[str], content: dict[str, Any]) -> list[str]:
    """Every entry counts with and without a leading `model.`."""
    made: list[str] = []
    for entry in entries:
        bare = entry.removeprefix("model.")
        made += [bare, f"model.{bare}"]
    return made


SGLANG = Engine(
    name="SGLang",
    version="0.5.23",
    sources=(
        f"{_LAYERS}/utils.py (is_layer_skipped, _module_path_match)",
        "sglang/srt/models/{qwen3_5,qwen3_5_mtp,qwen3_next,qwen3_next_mtp,deepseek_v2,deepseek_nextn}.py",
        "sglang/srt/model_loader/{loader,weight_utils}.py (packed_modules_mapping)",
        "https://github.com/sgl-project/sglang/tree/v0.5.23",
    ),
    methods={
        "fp8": Method(
            rule="segments, fused",
            keys=("ignored_layers", "modules_to_not_convert"),
            skip_empty=False,
            reads="takes an entry for whole segments anywhere in a name",
            source=f"{_LAYERS}/fp8.py (Fp8Config.from_config)",
            head=False,
            prepare=_both_roots,
            refuses=lambda content: None if "activation_scheme" in content else "activation_scheme is missing",
        ),
        "mxfp8": Method(
            rule="segments, fused",
            keys=("ignored_layers", "modules_to_not_convert"),
            skip_empty=False,
            reads="takes an entry for whole segments anywhere in a name",
            source=f"{_LAYERS}/fp8.py (Fp8Config.from_config)",
            head=False,
            prepare=_both_roots,
            refuses=lambda content: None if "activation_scheme" in content else "activation_scheme is missing",
        ),
        "modelopt": Method(
            rule="segments or glob",
            keys=("ignore", "quantization.exclude_modules"),
            reads="takes an entry for whole segments of a name or a glob over it",
            source=f"{_LAYERS}/modelopt_quant.py (ModelOptQuantConfig)",
            refuses=_modelopt,
        ),
        "compressed-tensors": Method(
            rule="end of name or re:",
            keys=("ignore",),
            reads="takes an entry for a name, its end from a dot on, or a regular expression after re:",
            source=f"{_LAYERS}/compressed_tensors/utils.py",
            head=False,
            untargeted="error",
        ),
        "quark": Method(
            rule="full name or re:, any expert",
            keys=("exclude",),
            reads="takes an entry for a full name, or for a regular expression after re:",
            source=f"{_LAYERS}/quark/utils.py (should_ignore_layer)",
            head=False,
        ),
        "auto-round": Method(
            rule="per layer",
            keys=(),
            reads="",
            source=f"{_LAYERS}/auto_round.py (SUPPORTED_DTYPES)",
            fp8=False,
            refuses=_auto_round,
        ),
    },
    families={
        "": Family(
            fused=QKV_AND_MLP,
            fixed=(_DRAFT,),
            note="no names of this model family were looked at: asked with those on disk, q, k, v and gate, up fused",
        ),
        "qwen3_5": Family(
            fused={**QKV_AND_MLP, **GDN},
            fixed=(_ROUTER, _GATE, _FC, _FP4_DRAFT, _QUARK_DRAFT, _VISION),
        ),
        "qwen3_5 text": Family(
            fused={**QKV_AND_MLP, **GDN},
            fixed=(_ROUTER, _GATE, _FC, _FP4_DRAFT, _QUARK_DRAFT, _VISION),
            note="it registers only Qwen3.5's ForConditionalGeneration classes: judged with the names on disk",
        ),
        "qwen3_next": Family(
            fused=QKV_AND_MLP,
            # the MTP model is built under `model`, so its one layer is asked for as the target's first
            renames=((r"^mtp\.layers\.", "model.layers."),),
            fixed=(_ROUTER, _GATE, _FC),
        ),
        "deepseek_v3": Family(
            fused={"gate_up_proj": QKV_AND_MLP["gate_up_proj"], "fused_qkv_a_proj_with_mqa": MLA},
            fixed=(
                _ROUTER,
                _INDEXER,
                Fixed(r"\.eh_proj$", "plain", "eh_proj is a plain torch Linear (models/deepseek_nextn.py)"),
                _DRAFT,
            ),
            plain_for_fp8=Consequence(UNKNOWN, "what its loader then does was not looked at"),
        ),
        "glm4_moe": Family(
            fused=QKV_AND_MLP,
            fixed=(
                _ROUTER,
                Fixed(r"\.eh_proj$", "plain", "eh_proj is a plain torch Linear (models/glm4_moe_nextn.py)"),
                _DRAFT,
            ),
            plain_for_fp8=Consequence(UNKNOWN, "what its loader then does was not looked at"),
        ),
    },
    fp8_for_plain=Consequence(
        SILENT, "values are cast to codes without a scale, and its scale stays as it was made, with no message"
    ),
    plain_for_fp8=Consequence(SILENT, "a scale without a parameter is passed over and the codes are taken for weights"),
    unread="the name is not among its quantisation methods",
)
