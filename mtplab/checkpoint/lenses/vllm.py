"""vLLM as read in its 0.33.0 wheel: which list it takes for each method, how it matches, what it names modules.

What 0.32.0 did with planted mistakes is held against it in tests/test_vllm_loads.py.

Only data, and the few refusals that its config classes make; matching is in `matching.py`.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.lenses.base import LOAD_ERROR, SILENT, UNKNOWN, Consequence, Engine, Family, Fixed, Method
from mtplab.checkpoint.lenses.fused import GDN, MLA, QKV_AND_MLP
from mtplab.checkpoint.lenses.matching import BLOCK
from mtplab.checkpoint.strict_json import shown

__all__ = ["VLLM"]

_LAYERS = "vllm/model_executor/layers/quantization"
_ROUTER = Fixed(r"\.mlp\.gate$", "plain", "the router is never given a quantisation config")
_INDEXER = Fixed(r"\.indexer\.", "unknown", "the indexer's projections are built in ways not looked at here")
_EH = Fixed(r"\.eh_proj$", "plain", "eh_proj is a plain torch Linear (models/deepseek_mtp.py, glm4_moe_mtp.py)")
_SHARED_HEAD = Fixed(r"\.shared_head\.head$", "unknown", "the draft's own head is asked for under another name")
_FULL = "takes an entry for a module's full name"


def _fp8(content: dict[str, Any]) -> str | None:
    if "activation_scheme" not in content:
        return "activation_scheme is missing, and it needs one"
    if content.get("weight_block_size") is not None and content["activation_scheme"] != "dynamic":
        return "weight_block_size with activations that are not dynamic"
    return None


def _fp8_scale(content: dict[str, Any]) -> str:
    """fp8.py, Fp8LinearMethod.create_weights."""
    return "weight_scale" if content.get("weight_block_size") is None else "weight_scale_inv"


def _modelopt(content: dict[str, Any]) -> str | None:
    said = content.get("quantization", content)
    if not isinstance(said, dict):
        return f"quantization is {shown(said)}, no object"
    keys = ("exclude_modules",) if said is not content else ("ignore", "exclude_modules")
    entries = next((said[key] for key in keys if key in said), [])
    if not isinstance(entries, list):
        return f"its list of what is not quantised is {shown(entries)}"
    return None if said.get("quant_algo") else "quant_algo is missing"


def _quark(content: dict[str, Any]) -> str | None:
    return None if content.get("export") is not None else "the key export is missing"


def _auto_round(content: dict[str, Any]) -> str | None:
    size = content.get("group_size")
    packing = content.get("packing_format")
    if packing not in (None, "auto_round:fp8", "auto_round:llm_compressor"):
        return f"packing_format {shown(packing)}; of FP8 it reads auto_round:fp8 in blocks"
    if packing != "auto_round:llm_compressor" and not (isinstance(size, list) and len(size) == 2):
        return f"group_size {shown(size)}; of FP8 it reads blocks of two dimensions"
    return None


def _stars(entries: list[str], content: dict[str, Any]) -> list[str]:
    """`a*` is taken as `a` and `a.*` before names are mapped."""
    made: list[str] = []
    for entry in entries:
        ends = len(entry) >= 2 and entry.endswith("*") and entry[-2] != "."
        made += [entry[:-1], entry[:-1] + ".*"] if ends else [entry]
    return made


def _unquantised_keys(entries: list[str], content: dict[str, Any]) -> list[str]:
    """auto-round: extra_config's keys for 16 bits, and the blocks beside which nothing is quantised."""
    extra = content.get("extra_config")
    kept = []
    for key, value in extra.items() if isinstance(extra, dict) else ():
        bits = value.get("bits") if isinstance(value, dict) else None
        if isinstance(key, str) and isinstance(bits, int) and bits >= 16:
            kept.append(key)
    blocks = content.get("block_name_to_quantize") or content.get("to_quant_block_names")
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    return [*kept, *(BLOCK + name for name in (blocks if isinstance(blocks, list) else ()) if isinstance(name, str))]


def _unset_names(entries: list[str], content: dict[str, Any]) -> list[str]:
    """torchao: what FqnToConfig sets to null is left alone too."""
    kind = content.get("quant_type")
    kind = kind.get("default") if isinstance(kind, dict) else None
    data = kind.get("_data") if isinstance(kind, dict) else None
    table = data.get("module_fqn_to_config") if isinstance(data, dict) else None
    return [*entries, *(key for key, value in (table.items() if isinstance(table, dict) else ()) if value is None)]


def _mapped(*prefixes: tuple[str, str]) -> Any:
    """The same prefixes on the list's entries as on the modules."""

    def apply(entries: list[str], _: str) -> list[str]:
        made = []
        for entry in entries:
            mark = BLOCK if entry.startswith(BLOCK) else ""
            name = entry.removeprefix(mark)
            for old, new in prefixes:
                name = new + name.removeprefix(old) if name.startswith(old) else name
            made.append(mark + name)
        return made

    return apply


_GDN = {**QKV_AND_MLP, **GDN}
_QWEN_FIXED = (
    _ROUTER,
    # https://github.com/vllm-project/vllm/pull/38650: NVFP4 files hold it in BF16 without listing it
    Fixed(r"^mtp\.fc$", "plain", "mtp.fc is forced unquantised under NVFP4 (pull 38650)", methods=("modelopt fp4",)),
    Fixed(r"\.shared_expert_gate$", "plain", "the shared expert's gate is never given a quantisation config"),
)

VLLM = Engine(
    name="vLLM",
    version="0.33.0",
    sources=(
        f"{_LAYERS}/utils/quant_utils.py (is_layer_skipped)",
        f"{_LAYERS}/utils/config_utils.py (find_matching_patterns)",
        "vllm/model_executor/models/{qwen3_5,qwen3_5_mtp,qwen3_next,deepseek_v2,deepseek_mtp}.py (names)",
        "vllm/model_executor/model_loader/default_loader.py (track_weights_loading: off for quantised models)",
        "https://github.com/vllm-project/vllm/tree/v0.33.0",
    ),
    methods={
        "fp8": Method(
            rule="full name",
            keys=("ignored_layers", "modules_to_not_convert"),
            reads=_FULL,
            source=f"{_LAYERS}/fp8.py (Fp8Config)",
            head=False,
            refuses=_fp8,
            scale=_fp8_scale,
        ),
        "fbgemm_fp8": Method(
            rule="full name",
            keys=("modules_to_not_convert",),
            reads=_FULL,
            source=f"{_LAYERS}/fbgemm_fp8.py; deprecated, needs --allow-deprecated-quantization",
            head=False,
            refuses=lambda content: None if "activation_scale_ub" in content else "activation_scale_ub is missing",
        ),
        "modelopt": Method(
            rule="full name, inside, glob",
            keys=("quantization.exclude_modules", "ignore", "exclude_modules"),
            skip_empty=False,
            alone="quantization",
            reads="takes an entry for a full name, a part of one or a glob",
            source=f"{_LAYERS}/modelopt.py (ModelOptQuantConfigBase.is_layer_excluded)",
            refuses=_modelopt,
            prepare=_stars,
        ),
        "mxfp8": Method(
            rule="full name, inside, glob",
            keys=("quantization.exclude_modules", "ignored_layers"),
            skip_empty=False,
            alone="quantization",
            reads="takes an entry for a full name, a part of one or a glob",
            source=f"{_LAYERS}/modelopt.py (ModelOptMxFp8Config.from_config)",
            prepare=_stars,
        ),
        "compressed-tensors": Method(
            rule="full name or re:",
            keys=("ignore",),
            reads="takes an entry for a full name, or for a regular expression after re:",
            source=f"{_LAYERS}/compressed_tensors/utils.py (should_ignore_layer, find_matched_target)",
            head=False,
            scale=lambda content: "weight_scale",
            untargeted="plain",
        ),
        "quark": Method(
            rule="full name or re:, any expert",
            keys=("exclude",),
            reads="takes an entry for a full name, or for a regular expression after re:",
            source=f"{_LAYERS}/quark/utils.py (should_ignore_layer)",
            head=False,
            refuses=_quark,
        ),
        "auto-round": Method(
            rule="per layer",
            keys=(),
            reads="takes a key of extra_config for a full name, its end, or a regular expression",
            source=f"{_LAYERS}/inc/config_parser.py",
            head=False,
            refuses=_auto_round,
            prepare=_unquantised_keys,
        ),
        "torchao": Method(
            rule="segments",
            keys=("modules_to_not_convert",),
            reads="takes an entry for whole segments of the name, with q, k and v only as qkv_proj",
            source=f"{_LAYERS}/torchao.py (should_skip)",
            head=False,
            prepare=_unset_names,
            fp8_for_plain=Consequence(UNKNOWN, "what its loader then does was not looked at"),
        ),
    },
    families={
        "": Family(
            fused=QKV_AND_MLP,
            note="no names of this model family were looked at: asked with those on disk, q, k, v and gate, up fused",
        ),
        "qwen3_5": Family(
            fused=_GDN,
            renames=(
                (r"^model\.language_model\.", "language_model.model."),
                (r"^model\.visual\.", "visual."),
                (r"^lm_head", "language_model.lm_head"),
            ),
            entries=_mapped(
                ("model.visual.", "visual."),
                ("lm_head.", "language_model.lm_head."),
                ("model.language_model.", "language_model.model."),
            ),
            fixed=_QWEN_FIXED,
            scales=True,
        ),
        "qwen3_5 text": Family(
            fused=_GDN,
            renames=((r"^model\.language_model\.", "model."),),
            entries=_mapped(("model.language_model.", "model.")),
            fixed=_QWEN_FIXED,
            scales=True,
        ),
        "qwen3_next": Family(fused=QKV_AND_MLP, fixed=_QWEN_FIXED),
        "deepseek_v3": Family(
            fused={"gate_up_proj": QKV_AND_MLP["gate_up_proj"], "fused_qkv_a_proj": MLA},
            fixed=(_ROUTER, _INDEXER, _EH, _SHARED_HEAD),
        ),
        "glm4_moe": Family(fused=QKV_AND_MLP, fixed=(_ROUTER, _EH, _SHARED_HEAD)),
    },
    fp8_for_plain=Consequence(
        SILENT, "values are cast to codes without a scale, and its scale stays as it was made, with no message"
    ),
    plain_for_fp8=Consequence(LOAD_ERROR, "the scale has no parameter to go to"),
    unread="the name is not among its quantisation methods",
)
