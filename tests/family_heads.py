"""What a family's head drafts, by transformers' own decoder layers and one sequence at a time: an oracle for heads that
transformers does not run, or runs in another convention than an engine does.

The head's decoder block is the layer behind the target's in a transformers model of one layer more, alone in a model of
its own; what joins embedding and hidden state is written down here once more. What engines differ in is a `Convention`.
Slow, and of one module: a head's first. Knows nothing of how mtplab runs anything.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from family_checkpoints import load_target, longer

__all__ = ["Convention", "HeadOracle"]


@dataclass(frozen=True)
class Convention:
    """What an engine does with a head. Stages as `mtplab.generate` has them."""

    target_hidden: str = "post_norm"  # of the target, that slot's hidden state is
    draft_hidden: str = "post_norm"  # of the head, that the next draft's slot gets
    masked: bool = False  # zeros in place of the embedding at the first slot
    own_head: bool = False  # the head's own output matrix, where it has one


# (norm of the embedding, of the hidden state, the matrix, the last norm), and whether the hidden state comes first
_PARTS = {
    "mtp.": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", False),
    "model.mtp_layers.": (
        *(f"model.mtp_layers.0.{x}" for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
        True,
    ),
}


class HeadOracle:
    """A BF16 checkpoint of `family_checkpoints`, in float32."""

    def __init__(self, folder: Path, convention: Convention = Convention()) -> None:
        self.convention = convention
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        text = config.get("text_config", config)
        layers = text["num_hidden_layers"]
        at = f"model.layers.{layers}."
        root = next((each for each in _PARTS if any(name.startswith(each) for name in tensors)), None)
        if root is None:
            infix = "transformer." if f"{at}transformer.shared_head.norm.weight" in tensors else ""
            parts = (f"{at}enorm", f"{at}hnorm", f"{at}eh_proj", f"{at}{infix}shared_head.norm")
            first, own = False, tensors.get(f"{at}{infix}shared_head.output.weight")
        else:
            *parts, first = _PARTS[root]
            own = None
        self.hidden_first, self.own = first, None if own is None else own.float()
        block = {"mtp.": "mtp.layers.0.", "model.mtp_layers.": "model.mtp_layers.0."}.get(root, at)
        extra = set(parts) | {f"{at}embed_tokens", f"{at}shared_head.head"}
        kept = {
            name.replace(block, at, 1) if name.startswith(block) else name: value
            for name, value in tensors.items()
            if name.rpartition(".")[0] not in extra and "shared_head" not in name
        }
        kept = {name: value.contiguous() for name, value in kept.items() if name not in _beyond(kept, layers)}
        with tempfile.TemporaryDirectory() as made:
            save_file(kept, Path(made) / "model.safetensors", {"format": "pt"})
            for name, content in (("config.json", longer(config, 1)), ("generation_config.json", {})):
                (Path(made) / name).write_text(json.dumps(content))
            whole = load_target(Path(made))
        self.target = whole.get_decoder()
        self.output = whole.lm_head.weight.detach()
        blocks, norm = self.target.layers, self.target.norm
        self.head = copy.deepcopy(self.target)
        self.head.layers = nn.ModuleList([self.head.layers[layers]])
        self._alone(self.head, layers)
        self.target.layers = nn.ModuleList(blocks[:layers])
        self.target.config.num_hidden_layers = layers
        self.norms = []
        for name in (parts[0], parts[1], parts[3]):
            made = copy.deepcopy(norm)
            made.weight = nn.Parameter(tensors[f"{name}.weight"].float())
            self.norms.append(made)
        self.fc = tensors[f"{parts[2]}.weight"].float()
        self.norm = norm
        self.target.norm = self.head.norm = nn.Identity()

    @staticmethod
    def _alone(head: nn.Module, layer: int) -> None:
        """A model of one layer, which was number `layer`, has that layer's kind."""
        head.config = copy.deepcopy(head.config)
        head.config.num_hidden_layers = 1
        if getattr(head.config, "layer_types", None):
            head.config.layer_types = [head.config.layer_types[layer]]

    @torch.no_grad()
    def states(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """(what the head gets of the target [t, h], the target's logits [t, v])."""
        before = self.target(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        after = self.norm(before)
        logits = after @ self.output.T
        return (after if self.convention.target_hidden == "post_norm" else before), logits

    @torch.no_grad()
    def drafts(self, ids: list[int], slot: int, depth: int, hidden: Tensor) -> Tensor:
        """Logits [depth, v] of the drafts of a round that begins with token `slot` + 1, fed the tokens of `ids` and the
        `states` of those up to `slot`: row j is draft j + 1, which stands for token `slot` + 2 + j."""
        rows = self._fused(ids[1 : slot + 2], hidden, True)
        out = []
        for step in range(depth):
            before = self.head(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, -1:]
            after = self.norms[2](before)
            matrix = self.own if self.convention.own_head and self.own is not None else self.output
            out.append(after[0] @ matrix.T)
            if step + 1 < depth:
                fed = after if self.convention.draft_hidden == "post_norm" else before
                rows = torch.cat([rows, self._fused([ids[slot + 2 + step]], fed, False)])
        return torch.stack(out)

    def _fused(self, ids: list[int], hidden: Tensor, first: bool) -> Tensor:
        embedded = self.target.embed_tokens(torch.tensor(ids))
        if first and self.convention.masked:
            embedded = embedded.clone()
            embedded[0] = 0
        both = [self.norms[0](embedded), self.norms[1](hidden)]
        return torch.cat(both[::-1] if self.hidden_first else both, -1) @ self.fc.T

    def hits(self, prompt: list[int], text: list[int], depth: int) -> tuple[Tensor, Tensor]:
        """Of a prompt's text of n tokens: hits [n − 1, depth] bool, whole from the left as a trace has them, and by how
        much the text's token leads the others there [n − 1, depth], NaN past its end."""
        ids, n = [*prompt, *text], len(text)
        hidden, _ = self.states(ids)
        hit, lead = torch.zeros(n - 1, depth, dtype=torch.bool), torch.full((n - 1, depth), torch.nan)
        for i in range(n - 1):
            steps = min(depth, n - 1 - i)
            slot = len(prompt) - 1 + i
            logits = self.drafts(ids, slot, steps, hidden[: slot + 1])
            meant = torch.tensor(text[i + 1 : i + 1 + steps])[:, None]
            mine = logits.gather(1, meant)[:, 0]
            lead[i, :steps] = mine - logits.scatter(1, meant, -torch.inf).amax(1)
            hit[i, :steps] = (lead[i, :steps] > 0).cumprod(0).bool()
        return hit, lead


def _beyond(names: Iterable[str], layers: int) -> set[str]:
    """Names of layers behind the head's first one."""
    numbers = {name: name.split(".")[2] for name in names if name.startswith("model.layers.")}
    return {name for name, number in numbers.items() if int(number) > layers}
