"""TensorRT-LLM: the counters and the OpenAI endpoint of a `trtllm-serve` that runs; it is not started here.

Its rounds are those that drafted at position 0, and what was accepted is counted position by position, when a request
ends; no bonus is among it, and drafts that the end of a text then cuts off are. The counters of iterations beside these
are not of whole rounds and are not read; neither are gauges, which are of the last iteration. With
`per_request_spec_decode_stats` an answer has its own counts.
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
from mtplab.engines.figures import Samples, label_of
from mtplab.engines.measured import Counts
from mtplab.engines.settings import Launch

__all__ = ["TensorrtLlm"]

_DRAFTED = "trtllm_spec_decode_drafted_tokens_total"
_ACCEPTED = "trtllm_spec_decode_accepted_tokens_total"


class TensorrtLlm(Engine):
    """`trtllm-serve`, with the PyTorch backend."""

    name = "tensorrt_llm"
    title = "TensorRT-LLM"
    version = "main of 2026 (050f80de)"
    sources = (
        "tensorrt_llm/metrics/collector.py: names, labels and when they move",
        "tensorrt_llm/_torch/speculative/spec_sampler_base.py: accepted before the text is cut; what is refused",
        "tensorrt_llm/serve/openai_server.py: where the metrics are; openai_protocol.py: what a completion takes",
        "tensorrt_llm/serve/postprocess_handlers.py: token_ids without detokenize, speculative_decoding of a choice",
        "tensorrt_llm/llmapi/llm_args.py: return_perf_metrics, MTP's max_draft_len, kv_cache_config",
    )
    prefixes = ("trtllm_",)
    figures = Figures(
        rounds=(_DRAFTED, "token_position", "0"),
        drafted=_DRAFTED,
        accepted=_ACCEPTED,
        positions=(_ACCEPTED, "token_position"),
        requests="trtllm_request_success_total",
        prompt_tokens="trtllm_prompt_tokens_total",
        generation_tokens="trtllm_generation_tokens_total",
        busy=(),  # its gauges of requests are renewed when one ends
        plain_steps=True,
    )
    metrics_path = "/prometheus/metrics"  # /metrics is its iterations, in JSON, and empties them
    answers_flag = "per_request_spec_decode_stats: true"
    metrics_flag = "return_perf_metrics: true in the file of --config"
    about_paths = ("/version",)
    # attached only; for what a server says of its cache
    caches: ClassVar[Mapping[str, str]] = {"none": "bfloat16", "fp8_e4m3": "fp8"}

    def known(self, about: Mapping[str, Any], samples: Samples) -> Known:
        version = about.get("/version")
        told = label_of(samples, "trtllm_speculative_config_info", "spec_num_tokens")
        depth = int(told) if told is not None and told.isascii() and told.isdigit() and len(told) < 3 else None
        # what it runs with is there from the start; of speculation only where there is any
        if "trtllm_model_config_info" in samples and "trtllm_speculative_config_info" not in samples:
            depth = 0
        cache = label_of(samples, "trtllm_kv_cache_config_info", "cache_dtype")
        # auto follows the checkpoint, which may ask for FP8
        policies = {"bfloat16": "none", "float16": "none", "fp8": "fp8_e4m3", "auto": None}
        return Known(
            version=version.get("version") if isinstance(version, dict) else None,
            depth=depth,
            quant_policy=policies.get(cache, cache),
        )

    def request(self, model: str, ids: Any, sampling: Any, seed: int) -> dict[str, Any]:
        # a field that it does not know is refused, and so are logprobs with speculation: ids only come this way
        return super().request(model, ids, sampling, seed) | {"detokenize": False}

    def counts(self, body: Mapping[str, Any], choice: Mapping[str, Any], tokens: int, depth: int) -> Counts | None:
        spec = choice.get("speculative_decoding")
        if spec is None:
            return None
        object_of(spec, "speculative_decoding")
        histogram = whole_numbers(spec.get("acceptance_histogram"), "acceptance_histogram")
        said = count_of(spec, "num_spec_steps"), count_of(spec, "total_accepted_draft_tokens")
        return counts_of_histogram(histogram, count_of(spec, "total_draft_tokens"), tokens, depth, said)

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        return f"engine {self.name}: {self.title} is not started here; start trtllm-serve and give its address"
