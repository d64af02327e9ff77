"""How each family of models names its MTP head, and where its config.json counts the head's layers.

Sources: the families' public checkpoints and the loaders of vLLM (model_executor/models/*_mtp.py) and transformers.
Names are those under the text model's own root. A table; it reads nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["BEHIND_COUNT", "COUNT_KEYS", "FUSIONS", "FUSION_NORMS", "LAYOUTS", "OWN_COUNT", "ROOTS", "Layout"]


@dataclass(frozen=True)
class Layout:
    """How a family names its head. `{i}` is a head layer's number, `{n}` the target's number of decoder layers + i."""

    family: str
    count_key: str  # in config.json: how many layers of a head there are
    root: str  # what all its names begin with; of those behind the target's layers, the target's own
    numbered: str  # what stands between the root and a head layer's number
    fusion: tuple[str, ...]  # modules that join embedding and hidden state, by full name over {i} and {n}
    inner: str = ""  # prefix of the decoder block within a head layer, which no other family has
    shared: tuple[str, ...] = ()  # modules that a file may leave out because the target's are used
    step_layers: int = 1  # layers on disk to one that config.json counts
    behind: bool = False  # whether head layers are numbered on behind the target's

    @property
    def layer(self) -> str:
        """Prefix of one head layer, as a regular expression whose only group is the number."""
        return re.escape(self.root + self.numbered) + r"([0-9]{1,4})\."


_V3 = ("model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.eh_proj")

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "Qwen3-Next, Qwen3.5 and later", "mtp_num_hidden_layers", "mtp.", "layers.",
        ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
        shared=("mtp.embed_tokens", "mtp.lm_head"),
    ),
    Layout(
        "Nemotron-3", "num_nextn_predict_layers", "mtp.", "layers.",
        ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.{last}.final_layernorm"),
        step_layers=2,
    ),
    Layout(
        "DeepSeek-V4", "num_nextn_predict_layers", "mtp.", "",
        ("mtp.{i}.e_proj", "mtp.{i}.h_proj", "mtp.{i}.enorm", "mtp.{i}.hnorm", "mtp.{i}.norm"),
    ),
    Layout(
        "MiMo-V2", "num_nextn_predict_layers", "model.mtp.", "layers.",
        tuple(f"model.mtp.layers.{{i}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
    ),
    Layout(
        "MiMo-7B", "num_nextn_predict_layers", "model.mtp_layers.", "",
        tuple(
            f"model.mtp_layers.{{i}}.{part}"
            for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ),
    ),
    Layout(
        "Step-3.5", "num_nextn_predict_layers", "model.layers.", "",
        (*_V3, "model.layers.{n}.shared_head.norm"), inner="transformer.",
        shared=("model.layers.{n}.shared_head.output",), behind=True,
    ),
    Layout(
        "DeepSeek-V3, GLM-4.5 and later", "num_nextn_predict_layers", "model.layers.", "",
        (*_V3, "model.layers.{n}.shared_head.norm"),
        shared=("model.layers.{n}.shared_head.head", "model.layers.{n}.embed_tokens"), behind=True,
    ),
)  # fmt: skip

# what config.json may call the number of head layers, the first that stands there counting
COUNT_KEYS = (*dict.fromkeys(layout.count_key for layout in LAYOUTS), "num_mtp_modules")
# of the layers that have a root of their own and are numbered from 0 (Qwen), and of those behind the target's
OWN_COUNT = LAYOUTS[0].count_key
BEHIND_COUNT = next(layout.count_key for layout in LAYOUTS if layout.behind)
# what the names of heads begin with that are not numbered among the target's layers
ROOTS = tuple(dict.fromkeys(layout.root for layout in LAYOUTS if not layout.behind))
# last names of the matrices that join embedding and hidden state: all that a head drafts passes through them
FUSIONS = frozenset(
    last for layout in LAYOUTS for name in layout.fusion if "norm" not in (last := name.rpartition(".")[2])
)
# norms that a head's layer has beside its block's
FUSION_NORMS = frozenset(
    name.rpartition("}.")[2] for layout in LAYOUTS for name in layout.fusion if "}." in name and "norm" in name
)
