"""What engines compute in one product: the projections that are stored apart, and the names they are asked for by.

One place for all lenses and for the audit; which of them an engine fuses is in the file of its name.
"""

from __future__ import annotations

__all__ = ["GDN", "GROUPS", "MLA", "QKV_AND_MLP"]

# attention and MLP, as nearly every family has them
QKV_AND_MLP = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# gated delta layers of Qwen3.5
GDN = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
# latent attention of DeepSeek-V3, whose fused name differs from engine to engine
MLA = ("q_a_proj", "kv_a_proj_with_mqa")

# the members of each, in their engines' order (vLLM's packed_modules_mapping for these families)
GROUPS: tuple[tuple[str, ...], ...] = (*QKV_AND_MLP.values(), *GDN.values(), MLA)
