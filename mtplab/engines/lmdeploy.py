"""lmdeploy: its counters, its `/generate` and `lmdeploy serve api_server` on the PyTorch backend.

A round is counted with what is delivered of it: where several steps are delivered as one, only the last one's round
is, with all that it accepted, while every token is counted. So tokens may be more than rounds and accepted drafts give,
which is how lost rounds are seen; where drafts that the end of a text cut off are counted, as many may be lost unseen.
No bonus is among the accepted.

Ids go in and come out at `/generate` only, which takes no seed, says nothing of drafts, and leaves out the token that
ends a text. `ignore_eos` forbids that token here, where others let it pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtplab.checkpoint.config_json import read_config, text_config
from mtplab.config import SamplingConfig
from mtplab.engines.engine import (
    Answer,
    Engine,
    Figures,
    Known,
    NotAnAnswer,
    Wanted,
    count_of,
    object_of,
    text_of,
    whole_numbers,
)
from mtplab.engines.figures import Samples, positions_of
from mtplab.engines.settings import Launch

__all__ = ["Lmdeploy"]

# model_type -> its speculative algorithm
_ALGORITHMS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), "deepseek_mtp"),
    **dict.fromkeys(("glm4_moe", "glm_moe_dsa"), "deepseek_mtp"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen3_5_mtp"),
    "hy_v3": "hy3_mtp",
}
# latent attention takes no quantised cache; with a sparse indexer, FP8 in a layout of its own
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_SPARSE = ("deepseek_v32", "glm_moe_dsa")


class Lmdeploy(Engine):
    """`lmdeploy serve api_server --backend pytorch`; TurboMind, its default, drafts nothing and only logs that."""

    name = "lmdeploy"
    title = "lmdeploy"
    version = "0.18.0"
    sources = (
        "lmdeploy/metrics/loggers.py: PrometheusStatLogger",
        "lmdeploy/pytorch/engine/engine_loop.py and mp_engine/base_worker.py: what of a round is counted, and lost",
        "lmdeploy/serve/openai/endpoints/generate.py and serve/core/async_engine.py: ids, and the token left out",
        "lmdeploy/cli/utils.py: options; lmdeploy/messages.py: QuantPolicy",
        "lmdeploy/pytorch/backends/cuda/attention: fa3.py and mla.py, which caches a verification reads",
        "lmdeploy/pytorch/configurations: deepseek_v2.py, glm4.py, qwen3_5.py, hy3.py, whose MTP heads it runs",
    )
    prefixes = ("lmdeploy:",)
    figures = Figures(
        rounds="lmdeploy:spec_decode_num_drafts_total",
        drafted="lmdeploy:spec_decode_num_draft_tokens_total",
        accepted="lmdeploy:spec_decode_num_accepted_tokens_total",
        positions=("lmdeploy:spec_decode_num_accepted_tokens_per_pos_total", "position"),
        requests="lmdeploy:request_success_total",
        prompt_tokens="lmdeploy:prompt_tokens_total",
        generation_tokens="lmdeploy:generation_tokens_total",
        busy=(),  # its gauges of requests are renewed every 10 s
        lossy=True,
    )
    metrics_flag = "no --disable-metrics"
    completions_path = "/generate"
    idle: ClassVar[Mapping[str, Any]] = {"min_p": 0.0, "repetition_penalty": 1.0}

    program = ("lmdeploy", "serve", "api_server")
    package = "lmdeploy"
    # its key is an option, --api-keys, and would be seen by everyone on the machine
    key_variable = None
    caches: ClassVar[Mapping[str, str]] = {
        "none": "0",
        "int4": "4",
        "int8": "8",
        "fp8_e4m3": "16",
        "fp8_e5m2": "17",
        "turboquant": "42",
    }
    reserved = (
        *("--backend", "--server-name", "--server-port", "--model-name", "--api-keys", "--disable-metrics", "--ssl"),
        *(
            "--quant-policy",
            "--model-format",
            "--generation-config",
            "--speculative-algorithm",
            "--speculative-num-draft-tokens",
        ),
        *("--speculative-draft-model", "--enable-prefix-caching", "--tp", "--dp", "--ep"),
    )
    abbreviations = True

    def known(self, about: Mapping[str, Any], samples: Samples) -> Known:
        """Its depth once it has drafted; it says nothing else."""
        return Known(depth=positions_of(samples, self.figures))

    def request(self, model: str, ids: Sequence[int], sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        chosen = {name: value for name, value in self.chosen(sampling, seed).items() if name != "seed"}
        return {
            "input_ids": list(ids),
            "max_tokens": sampling.max_new_tokens,
            **chosen,
            "ignore_eos": sampling.ignore_eos,
            "stream": False,
        }

    def answer(self, body: Any, depth: int) -> Answer:
        about = object_of(object_of(body, "answer").get("meta_info"), "meta_info")
        ids, given = whole_numbers(body.get("output_ids"), "output_ids"), count_of(about, "completion_tokens")
        if len(ids) != given:
            raise NotAnAnswer(f"it has {len(ids)} ids, and its meta_info counts {given} tokens")
        # the token that ended it came of a round like the others, and its counters have it
        ended = object_of(about.get("finish_reason"), "finish_reason").get("type") == "stop"
        completion = given + ended
        counts = self.own_counts(body, {}, completion, depth)
        return Answer(text_of(body, "text"), ids, count_of(about, "prompt_tokens"), completion, counts)

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        for degree in ("dp", "ep"):
            if getattr(settings, degree) > 1:
                return (
                    f"{degree} {getattr(settings, degree)}: {self.title} then starts a server for every rank, each "
                    "with counts of its own; start it with tp alone"
                )
        text = text_config(read_config(Path(wanted.checkpoint), required=True))
        family = str(text.get("model_type")).removesuffix("_text")
        if wanted.depth and family not in _ALGORITHMS:
            return (
                f"depth {wanted.depth}: {self.title} {self.version} runs no MTP head of model_type {family!r:.40}; it "
                f"runs those of {', '.join(_ALGORITHMS)}"
            )
        policy = wanted.quant_policy
        if policy != "none" and policy in self.caches:
            if family in _LATENT or (family in _SPARSE and policy != "fp8_e4m3"):
                return f"quant_policy {policy}: {self.title} {self.version} has no such cache for {family}; use none"
            if wanted.depth and family not in _SPARSE:
                return (
                    f"quant_policy {policy} at depth {wanted.depth}: {self.title} {self.version} verifies drafts in a "
                    "kernel that reads an unquantised cache only; use none, or depth 0"
                )
            heads = text.get("head_dim")
            if policy == "turboquant" and type(heads) is int and heads & (heads - 1):
                return f"quant_policy {policy}: {self.title} rotates rows of a power of two, and head_dim is {heads}"
        return super().refusal(wanted, settings)

    def remark(self, wanted: Wanted) -> str | None:
        if wanted.depth:
            return (
                "lmdeploy counts rounds as answers are delivered: of each text, rounds of as many tokens as its end "
                f"cut off, {wanted.depth} at most, may be missing unseen"
            )
        return None

    def arguments(self, wanted: Wanted, settings: Launch, name: str, port: int) -> list[str]:
        out = [wanted.served, "--backend", "pytorch", "--model-name", name]
        out += ["--server-name", settings.host, "--server-port", str(port)]
        out += ["--generation-config", "lmdeploy", "--quant-policy", self.caches[wanted.quant_policy]]
        if wanted.depth:
            text = text_config(read_config(Path(wanted.checkpoint), required=True))
            family = str(text.get("model_type")).removesuffix("_text")
            out += ["--speculative-algorithm", _ALGORITHMS[family]]
            out += ["--speculative-num-draft-tokens", str(wanted.depth)]
        return out + (["--tp", str(settings.tp)] if settings.tp > 1 else [])
