"""SGLang: its requests' own details, its OpenAI endpoint and `sglang serve`.

Its metrics count verifications when a request ends, and no drafts: what was accepted is said by each answer that is
asked for it, as how many rounds accepted how many. No bonus is among these, and drafts that the end of a text then cuts
off are. The gauges of acceptance are of a last few steps only and are not read. A step that only prefills again, after
a request was put off, is no round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mtplab.engines.engine import (
    Engine,
    Figures,
    Known,
    Wanted,
    count_of,
    counts_of_histogram,
    object_of,
    whole_numbers,
)
from mtplab.engines.figures import Samples
from mtplab.engines.measured import Counts
from mtplab.engines.settings import Launch
from mtplab.errors import MtplabError, printable

__all__ = ["Sglang"]


class Sglang(Engine):
    """`sglang serve`."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    sources = (
        "sglang/srt/observability/metrics_collector.py: names, and that they move when a request ends",
        "sglang/srt/managers/scheduler_components/batch_result_processor.py: what a verification counts",
        "sglang/srt/managers/tokenizer_manager.py: spec_* of a request's meta_info",
        "sglang/srt/entrypoints/openai/protocol.py: return_spec_tokens_details, return_token_ids",
        "sglang/srt/sampling/sampling_params.py: what top_k -1 and temperature 0 mean",
        "sglang/srt/arg_groups: speculative_hook.py, fields/model.py, the server's options",
    )
    prefixes = ("sglang:",)
    figures = Figures(
        rounds="sglang:spec_verify_calls_total",
        drafted=None,
        accepted=None,
        positions=None,
        requests="sglang:num_requests_total",
        prompt_tokens="sglang:prompt_tokens_total",
        generation_tokens="sglang:generation_tokens_total",
        busy=(),  # its gauges of requests are renewed once in many steps
        plain_steps=True,
    )
    metrics_flag = "--enable-metrics"
    health_path = "/ready"  # /health runs a request of its own
    about_paths = ("/server_info",)
    tokenize_path = "/tokenize"
    every_token = -1
    idle: ClassVar[Mapping[str, Any]] = {"min_p": 0.0, "repetition_penalty": 1.0}

    program = ("sglang", "serve")
    package = "sglang"
    caches: ClassVar[Mapping[str, str]] = {"none": "auto", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    draft_cache = True
    # a --config file may hold any of the others
    reserved = (
        *("--model-path", "--model", "--served-model-name", "--host", "--port", "--api-key", "--config"),
        *("--ssl-keyfile", "--ssl-certfile", "--enable-metrics", "--disable-radix-cache"),
        *("--kv-cache-dtype", "--quantization", "--speculative-algorithm", "--speculative-num-steps"),
        *("--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-draft-kv-cache-dtype"),
        *("--speculative-draft-model-path", "--speculative-draft-model", "--pp-size", "--pipeline-parallel-size"),
        *("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc", "--speculative-adaptive"),
        *("--tp-size", "--tp", "--tensor-parallel-size", "--dp-size", "--dp", "--data-parallel-size"),
        *("--ep-size", "--ep", "--expert-parallel-size"),
    )
    abbreviations = True

    def known(self, about: Mapping[str, Any], samples: Samples) -> Known:
        """Raises MtplabError where it drafts what cannot be counted by position, or accepts more than the target
        would."""
        told = about.get("/server_info")
        if not isinstance(told, dict):
            return Known()
        depth = 0
        if told.get("speculative_algorithm"):
            depth = told.get("speculative_num_steps")
            for name, plain in _AS_A_CHAIN.items():
                if told.get(name) not in (None, plain):
                    raise MtplabError(
                        f"SGLang runs with {name} {printable(str(told[name]))[:40]}; rounds are counted for {plain} "
                        "only: start it so"
                    )

        def number(value: Any) -> int | None:
            return value if type(value) is int and value >= 0 else None

        def policy(value: Any) -> str | None:
            # auto follows the checkpoint, which may ask for FP8
            return (
                {"bf16": "none", "bfloat16": "none", "auto": None}.get(value, value) if isinstance(value, str) else None
            )

        version = told.get("version")
        return Known(
            version=version if isinstance(version, str) else None,
            depth=number(depth),
            quant_policy=policy(told.get("kv_cache_dtype")),
            draft_quant_policy=policy(told.get("speculative_draft_kv_cache_dtype")) if depth else None,
            tp=number(told.get("tp_size")),
            ep=number(told.get("ep_size")),
            dp=number(told.get("dp_size")),
        )

    def request(self, model: str, ids: Any, sampling: Any, seed: int) -> dict[str, Any]:
        more = {"return_token_ids": True, "return_spec_tokens_details": True}
        return super().request(model, ids, sampling, seed) | more

    def counts(self, body: Mapping[str, Any], choice: Mapping[str, Any], tokens: int, depth: int) -> Counts | None:
        more = body.get("sglext")
        spec = more.get("spec_tokens_details") if isinstance(more, dict) else None
        if spec is None:
            return None
        object_of(spec, "spec_tokens_details")
        # as long as the most that a round accepted
        histogram = whole_numbers(spec.get("spec_correct_drafts_histogram"), "spec_correct_drafts_histogram")
        said = count_of(spec, "spec_verify_ct"), count_of(spec, "spec_num_correct_drafts")
        return counts_of_histogram(histogram, count_of(spec, "spec_num_proposed_drafts"), tokens, depth, said)

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        if settings.tp % settings.ep:
            return f"ep {settings.ep}: {self.title} spreads experts over the tp = {settings.tp} ranks, evenly"
        return super().refusal(wanted, settings)

    def remark(self, wanted: Wanted) -> str | None:
        if wanted.depth and wanted.draft_quant_policy == "none" != wanted.quant_policy:
            return "SGLang keeps the draft's cache in BF16, whatever it computes in"
        return None

    def arguments(self, wanted: Wanted, settings: Launch, name: str, port: int) -> list[str]:
        out = ["--model-path", wanted.served, "--served-model-name", name]
        out += ["--host", settings.host, "--port", str(port)]
        out += ["--disable-radix-cache", "--enable-metrics"]
        if wanted.quant_policy != "none":
            out += ["--kv-cache-dtype", self.caches[wanted.quant_policy]]
        if wanted.depth:
            # one draft after another; it would make a tree of its own choice
            out += ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", wanted.served]
            out += ["--speculative-num-steps", str(wanted.depth), "--speculative-eagle-topk", "1"]
            out += ["--speculative-num-draft-tokens", str(wanted.depth + 1)]
            if wanted.draft_quant_policy != wanted.quant_policy:
                draft = "bfloat16" if wanted.draft_quant_policy == "none" else self.caches[wanted.draft_quant_policy]
                out += ["--speculative-draft-kv-cache-dtype", draft]
        for degree, flag in ((settings.tp, "--tp-size"), (settings.ep, "--ep-size"), (settings.dp, "--dp-size")):
            if degree > 1:
                out += [flag, str(degree)]
        return out


# a tree has no positions; a varying depth is none; thresholds below 1 accept what the target would not give
_AS_A_CHAIN: dict[str, Any] = {
    "speculative_eagle_topk": 1,
    "speculative_adaptive": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}
