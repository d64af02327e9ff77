"""A loaded model: target, head, tokenizer, and what they weigh.

Knows nothing of rounds: it makes caches and passes for whoever runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtplab.checkpoint import Checkpoint, Plan, open_checkpoint
from mtplab.checkpoint.strict_json import read_json_object
from mtplab.config import EngineConfig, SpecConfig
from mtplab.errors import CheckpointError, ConfigError, not_text
from mtplab.models.asked import as_served, check_exclusions, load_settings, plan_arguments
from mtplab.models.build import Target, build_head, build_target
from mtplab.models.cache import DeltaState, KVCache
from mtplab.models.cache_fit import check_policy
from mtplab.models.config import config_of
from mtplab.models.families import family_of
from mtplab.models.head import Head
from mtplab.models.machine import give_back, shortage_said
from mtplab.models.memory import refuse_what_cannot_fit, weights_in_memory
from mtplab.models.parameters import Parameters
from mtplab.models.spec import CacheRows, ModelConfig
from mtplab.quant.policy import QuantPolicy, resolve_policy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(eq=False)
class Model:
    """What `load_model` returns, not to be changed: compiled passes rely on it.

    `dtype` is computed in; `checkpoint_dtype` is what the files are written for.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    plan: Plan
    target: Target
    draft: Head | None
    tokenizer: Tokenizer | None
    device: torch.device
    dtype: torch.dtype
    checkpoint_dtype: torch.dtype
    engine: EngineConfig
    spec: SpecConfig

    def policy(self, part: str = "target") -> QuantPolicy:
        """The KV-cache policy a run uses by default for "target" or "draft"; a draft that inherits the target's has no
        layer kept unquantised: its layers are other ones."""
        own = self.spec.quant_policy if part == "draft" else None
        found = resolve_policy(self.engine.quant_policy if own is None else own)
        return found.everywhere if part == "draft" and own is None else found

    @property
    def can_be_exact(self) -> bool:
        """Whether a row's bits can be promised not to depend on its neighbours: float32 on a CPU."""
        return self.device.type == "cpu" and self.dtype == torch.float32

    def given(self, hidden: Tensor, target: Target | None = None) -> Tensor:
        """What the head reads of the target's hidden states [m, hidden], which are from before the final norm, as this
        family is served; by another target of the same shape where one is given."""
        stage = as_served(self.spec, self.checkpoint.config).target_hidden
        return hidden if stage == "pre_norm" else (target or self.target).normed(hidden)

    def with_exclusions(
        self,
        exclude: str | list[str] | None,
        draft_exclude: str | list[str] | None = None,
        model_format: str | None = None,
    ) -> Model:
        """This model as `load_model` gives it with other exclusions, and what both treat alike shared; see
        `variant.with_exclusions`."""
        from mtplab.models.variant import with_exclusions

        return with_exclusions(self, exclude, draft_exclude, model_format)

    def overflow_advice(self) -> str:
        """What to try where the arithmetic overflowed: the end of a sentence that says so. Names only settings that
        would change something."""
        steps = []
        if self.dtype != torch.float32:
            steps.append("dtype='float32'")
        if self.engine.activation_rounding and any(module.activation == "fp8" for module in self.plan.modules):
            steps.append("activation_rounding=False to see whether rounding does it")
        if not steps:
            return (
                ", in float32 with no input rounded: the weights are too large for this model. Check that they and "
                "config.json belong together and, where they are FP8, that the scales are those they were stored with."
            )
        return f": try mtplab.load_model(..., {', or '.join(steps)})."

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises CheckpointError if there is no tokenizer, ConfigError for
        what is no text."""
        if not isinstance(text, str):
            raise ConfigError(f"text is {text!r:.60}; expected a string")
        fault = not_text(text)
        if fault is not None:
            raise ConfigError(f"text {fault}")
        return self._tokenizer().encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens left out. Raises CheckpointError if there is no tokenizer."""
        return self._tokenizer().decode(ids, skip_special_tokens=True)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.path}: no tokenizer.json; give prompts as lists of token ids, or add the file"
            )
        return self.tokenizer

    def kv_bytes_per_token(self, policy: str | int | QuantPolicy | None = None, part: str = "target") -> int:
        """KV-cache bytes one token adds, all layers of the target or the draft together."""
        return sum(self.kv_layer_bytes(self.policy(part) if policy is None else policy, part))

    def kv_layer_bytes(self, policy: str | int | QuantPolicy, part: str = "target") -> list[int]:
        """The same layer by layer; 0 for a delta-rule layer, which keeps a state instead."""
        chosen, size = resolve_policy(policy), self.checkpoint_dtype.itemsize
        if part == "target":
            layers = [(chosen.at(each.number), each.rows) for each in self.config.layers]
        else:
            layers = [(chosen, each.rows) for each in self.config.draft_layers]
        return [
            0 if rows is None else own.bytes_per_token(rows.heads, rows.dim, size, rows.sides) for own, rows in layers
        ]

    def state_bytes(self) -> int:
        """Bytes of delta-rule state per sequence: it does not grow with the context and is never quantised."""
        size = self.checkpoint_dtype.itemsize
        return sum(delta.conv_size * size + delta.state_size * 4 for delta in self.config.deltas)

    def target_caches(
        self, batch: int, capacity: int, policy: QuantPolicy, kernels: bool = False
    ) -> list[KVCache | DeltaState]:
        """Empty caches, one per layer of the target; `kernels`: for a run that decodes with them. Raises ConfigError
        for a policy that does not fit, or whose scales are not there (`decode/calibration.py` finds them)."""
        check_policy(self.config, policy)
        return [
            self._kv_cache(batch, capacity, policy, kernels, layer.number, layer.rows)
            if layer.rows is not None
            else DeltaState(batch, layer.mixer, self.dtype, self.device)
            for layer in self.config.layers
        ]

    def draft_caches(
        self, depth: int, batch: int, capacity: int, policy: QuantPolicy, kernels: bool = False
    ) -> list[KVCache]:
        """The head's empty caches for drafting to this depth: one, or one for each step (`head.py`). Raises ConfigError
        likewise."""
        c = self.config
        check_policy(c, policy, "draft")
        steps = (step % c.mtp_layers for step in range(c.draft_caches(depth)))
        return [self._kv_cache(batch, capacity, policy, kernels, i, c.draft_layers[i].rows) for i in steps]

    def _kv_cache(
        self, batch: int, capacity: int, policy: QuantPolicy, kernels: bool, layer: int, rows: CacheRows
    ) -> KVCache:
        own, dtypes = policy.at(layer), (self.dtype, self.checkpoint_dtype)
        return KVCache(own, batch, rows, capacity, *dtypes, self.device, kernels, own.scales_of(layer))


def load_model(
    path: str | Path | Checkpoint,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    exclude: str | list[str] | None = None,
    draft_exclude: str | list[str] | None = None,
    quant_policy: str | int | QuantPolicy = "none",
    draft_quant_policy: str | int | QuantPolicy | None = None,
    model_format: str | None = None,
    activation_rounding: bool = True,
    exact: bool = True,
    check_memory: bool = True,
    layers: str | Iterable[int] | None = None,
) -> Model:
    """Load a checkpoint and its MTP head.

    Args:
        path: folder with config.json and safetensors, or what `open_checkpoint` gave of one.
        device: "cpu", "cuda", …
        dtype: compute dtype; float32 on a CPU and the checkpoint's on a GPU by default.
        exclude: modules of the target kept from FP8: globs over names on disk, or "published" or "none".
        draft_exclude: the same for the head; `exclude` by default.
        quant_policy, draft_quant_policy: default KV-cache policies of a run; the draft inherits the target's.
        model_format: "fp8" quantises a BF16 checkpoint as it is loaded, head included (128×128 blocks, E4M3).
        activation_rounding: round the inputs of FP8 layers to E4M3 (W8A8), with the scales that the checkpoint's
            format gives them: per token and 128 features beside blocks, else per token, or the stored one.
        exact: arithmetic in which a row does not depend on the rows beside it (float32 on a CPU).
        layers: of the target, "0-3" or numbers: a slice of a model that this machine cannot hold. Embedding, final
            norm, vocabulary head and MTP head are loaded with it. What it generates would not be the model's, so only
            its arithmetic can be studied (`mtplab.numerics`).
        check_memory: refuse at once weights that are more than the memory available; see `mtplab.memory`.

    Weights are read a band of rows at a time: at the worst moment there is one matrix beside those that stay.

    Raises CheckpointError for files that are missing, broken or of another architecture, ConfigError for settings.
    """
    engine, spec = load_settings(
        device,
        dtype,
        exclude,
        draft_exclude,
        quant_policy,
        draft_quant_policy,
        model_format,
        activation_rounding,
        exact,
        layers,
    )
    return load_configured(path, engine, spec, check_memory)


def load_configured(
    path: str | Path | Checkpoint, engine: EngineConfig, spec: SpecConfig, check_memory: bool = True
) -> Model:
    """`load_model` from validated settings, where the draft's weight format may differ from the target's."""
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    check_exclusions(checkpoint, engine, spec)
    plan = checkpoint.plan(**plan_arguments(engine, spec))
    config = config_of(checkpoint, *_eos_override(checkpoint)).slice(engine.layers)
    where, stored = _device(engine.device), _dtype(config.dtype)
    compute = _dtype(engine.dtype) if engine.dtype else (torch.float32 if where.type == "cpu" else stored)
    if check_memory:
        refuse_what_cannot_fit(checkpoint, weights_in_memory(checkpoint, plan, engine, config))
    parameters = Parameters(checkpoint, plan, compute, where, engine.activation_rounding)
    with shortage_said(checkpoint.path), torch.inference_mode():
        target = build_target(config, parameters)
        draft = build_head(config, family_of(checkpoint.config)[0], parameters, target)
    give_back()
    return Model(
        config=config,
        checkpoint=checkpoint,
        plan=plan,
        target=target,
        draft=draft,
        tokenizer=_read_tokenizer(checkpoint),
        device=where,
        dtype=compute,
        checkpoint_dtype=stored,
        engine=engine,
        spec=spec,
    )


def _eos_override(checkpoint: Checkpoint) -> tuple[Any, Path]:
    """(eos_token_id of generation_config.json, which wins over config.json's, or None; the file it is from)."""
    file = checkpoint.path / "generation_config.json"
    if not file.exists():
        return None, file
    return read_json_object(file, "the generation settings").get("eos_token_id"), file


def _device(device: str | torch.device) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}; expected a torch device such as 'cpu' or 'cuda:0'") from None
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}; expected 'cpu', 'cuda' or 'cuda:N'")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, but torch sees no GPU here; use device='cpu'")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {str(device)!r}, but torch sees {torch.cuda.device_count()} GPUs")
    return where


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype).removeprefix("torch."))
    if found not in _DTYPES.values():
        raise ConfigError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    return found


def _read_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    from tokenizers import Tokenizer

    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_buffer(file.read_bytes())  # the library takes no path that is not UTF-8
    except Exception as error:  # the library raises bare Exception for every fault in the file
        raise CheckpointError(f"{file}: not a tokenizer that the tokenizers library can read ({error})") from None
