"""vLLM: its counters, its OpenAI endpoint and `vllm serve`.

A round is counted for every request and step that verified drafts, and all accepted ones of it count, those that the
budget or the end of text then cuts off too; no bonus is among them. Steps without drafts are no rounds: the first after
a preemption, and from 0.33 on the last of a text where nothing is left to draft. With
`--per-request-spec-decode-metrics detailed` every answer has its own accepted drafts step by step, from which the cut
ones can be taken out; with `summary` it has them by number. A prompt of one token is padded with drafts that nobody
made where others run beside it, and that counts as a round: nothing here can tell it from one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from mtplab.engines.engine import (
    Engine,
    Figures,
    Known,
    NotAnAnswer,
    Wanted,
    count_of,
    counts_of_histogram,
    object_of,
    whole_numbers,
)
from mtplab.engines.figures import Samples, label_of, positions_of
from mtplab.engines.measured import Counts
from mtplab.engines.settings import Launch

__all__ = ["Vllm"]


class Vllm(Engine):
    """`vllm serve`."""

    name = "vllm"
    title = "vLLM"
    version = "0.32.0"
    sources = (
        "vllm/v1/spec_decode/metrics.py: SpecDecodingProm, the counters and when they are raised",
        "vllm/v1/core/sched/scheduler.py: update_from_output, what is counted before what is cut; the same in 0.33.0",
        "vllm/v1/metrics/loggers.py: PrometheusStatLogger, requests and tokens",
        "vllm/entrypoints/openai/completion/protocol.py: what a completion takes and gives",
        "vllm/engine/arg_utils.py: EngineArgs.add_cli_args; vllm/utils/argparse_utils.py: how options may be written",
        "vllm/entrypoints/cli/serve.py, vllm/utils/argparse_utils.py: the model by place (a `--model` is to go there); "
        "vllm/entrypoints/openai/api_server.py, run as a module: by option",
        "vllm/entrypoints/generate/base/protocol.py: SpeculativeDecodingMetrics, of one request",
        "vllm/config/cache.py: CacheDType; vllm/config/speculative.py: SpeculativeConfig",
        "vllm-project/vllm issues 40880, 52475, 53180: TurboQuant caches with speculation",
    )
    prefixes = ("vllm:",)
    figures = Figures(
        rounds="vllm:spec_decode_num_drafts_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        positions=("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"),
        requests="vllm:request_success_total",
        prompt_tokens="vllm:prompt_tokens_total",
        generation_tokens="vllm:generation_tokens_total",
        busy=("vllm:num_requests_running", "vllm:num_requests_waiting"),
        plain_steps=True,
        all_positions=True,
    )
    metrics_flag = "no --disable-log-stats"
    answers_flag = "--per-request-spec-decode-metrics detailed"
    about_paths = ("/version",)
    tokenize_path = "/tokenize"
    # the checkpoint's generation_config has these too, and a min_p above 0 is refused with speculation
    idle: ClassVar[Mapping[str, Any]] = {"min_p": 0.0, "repetition_penalty": 1.0}

    program = ("vllm", "serve")
    package = "vllm"
    key_variable = "VLLM_API_KEY"
    # a --config file may hold any of the others; without stats there are no metrics; with TLS the address is another
    reserved = (
        *("--model", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--config"),
        *("--ssl-keyfile", "--ssl-certfile", "--disable-log-stats", "--per-request-spec-decode-metrics"),
        *("--generation-config", "--override-generation-config"),
        *("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
        *("--kv-cache-dtype", "--quantization", "-q", "--quantization-config", "--enable-prefix-caching"),
        *("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp", "--enable-expert-parallel", "-ep"),
    )
    abbreviations = True
    # ours on the left; its per-token-head caches are symmetric, ours (lmdeploy's) have a zero too, so they are not the
    # same arithmetic and `remark` says so
    caches: ClassVar[Mapping[str, str]] = {
        "none": "auto",
        "fp8_e4m3": "fp8_e4m3",
        "fp8_e4m3:checkpoint": "fp8_e4m3",
        "fp8_e5m2": "fp8_e5m2",
        "int8": "int8_per_token_head",
        "int4": "int4_per_token_head",
    }
    draft_cache = True

    def known(self, about: Mapping[str, Any], samples: Samples) -> Known:
        version = about.get("/version")
        cache = label_of(samples, "vllm:cache_config_info", "cache_dtype")
        names = {"auto": "none", "bfloat16": "none", "float16": "none", "fp8": "fp8_e4m3"}
        own = {word: policy for policy, word in reversed(self.caches.items())}
        depth, engines = positions_of(samples, self.figures), samples.get("vllm:generation_tokens_total", [])
        # all positions are there from the start; without speculation none is
        if depth is None and engines and self.figures.rounds not in samples:
            depth = 0
        return Known(
            version=version.get("version") if isinstance(version, dict) else None,
            depth=depth,
            quant_policy=None if cache is None else names.get(cache, own.get(cache, cache)),
            dp=len({labels.get("engine") for labels, _ in engines}) or None,
        )

    def request(self, model: str, ids: Any, sampling: Any, seed: int) -> dict[str, Any]:
        return super().request(model, ids, sampling, seed) | {"return_token_ids": True}

    def counts(self, body: Mapping[str, Any], choice: Mapping[str, Any], tokens: int, depth: int) -> Counts | None:
        spec = _speculation(body)
        if spec is None:
            return None
        if spec.get("per_step_accepted") is None:
            histogram = whole_numbers(spec.get("acceptance_histogram"), "acceptance_histogram")
            return counts_of_histogram(histogram, count_of(spec, "num_draft_tokens"), tokens, depth)
        emitted = self.emitted(body, tokens, depth)
        drafted = whole_numbers(spec.get("per_step_drafted"), "per_step_drafted")
        places = tuple(sum(each > j for each in emitted) for j in range(1, depth + 1))
        # what is left came of steps without drafts, a token each
        rounds = len(emitted) + tokens - sum(emitted)
        return Counts(tokens, rounds, sum(drafted), sum(emitted) - len(emitted), places)

    def emitted(self, body: Mapping[str, Any], tokens: int, depth: int) -> tuple[int, ...] | None:
        spec = _speculation(body)
        if spec is None or spec.get("per_step_accepted") is None:
            return None
        accepted = whole_numbers(spec["per_step_accepted"], "per_step_accepted")
        drafted = whole_numbers(spec.get("per_step_drafted"), "per_step_drafted")
        if len(accepted) != len(drafted) or any(not a <= d <= depth for a, d in zip(accepted, drafted, strict=True)):
            raise NotAnAnswer(f"its rounds drafted {drafted!r:.40} and accepted {accepted!r:.40}, at depth {depth}")
        left, found = tokens, []
        for each in accepted:
            found.append(min(each + 1, left))
            left -= found[-1]
        if 0 in found:
            raise NotAnAnswer(f"its {len(accepted)} rounds give more than its {tokens} tokens")
        return tuple(found)

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        if settings.ep not in (1, settings.tp * settings.dp):
            return (
                f"ep {settings.ep}: {self.title} spreads experts over all of tp × dp = {settings.tp * settings.dp} "
                "ranks, or over none"
            )
        for setting, policy in (
            ("quant_policy", wanted.quant_policy),
            ("draft_quant_policy", wanted.draft_quant_policy),
        ):
            if policy.startswith("turboquant"):
                return (
                    f"{setting} {policy}: {self.title}'s turboquant caches are of other widths (K/V in 8/4, 4/4, 3/4 "
                    "or 3/3 bits, mtplab's and lmdeploy's in 4/2), and with speculation their texts are wrong without "
                    "an error; use lmdeploy, at depth 0"
                )
        return super().refusal(wanted, settings)

    def remark(self, wanted: Wanted) -> str | None:
        words = [self.cache(policy) for policy in (wanted.quant_policy, wanted.draft_quant_policy)]
        if any(word is not None and word.endswith("_per_token_head") for word in words):
            return "vLLM's int8 and int4 caches are symmetric, per token and head; mtplab's and lmdeploy's have a zero"
        return None

    def arguments(self, wanted: Wanted, settings: Launch, name: str, port: int) -> list[str]:
        # `vllm serve` takes the model by place, and will refuse its option; the module behind it takes the option alone
        by_option = any("api_server" in word for word in settings.command or ())
        out = [*(["--model"] if by_option else []), wanted.served, "--served-model-name", name]
        out += ["--host", settings.host, "--port", str(port)]
        # what is cached would not be asked of the target again, and a prompt's cost would hang on those before it
        out += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
        out += ["--max-model-len", str(wanted.context)]
        if wanted.quant_policy != "none":
            out += ["--kv-cache-dtype", self.caches[wanted.quant_policy]]
        if wanted.depth:
            spec: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": wanted.depth}
            if wanted.draft_quant_policy != wanted.quant_policy:
                spec["kv_cache_dtype"] = self.caches[wanted.draft_quant_policy]
            out += ["--speculative-config", json.dumps(spec)]
            out += ["--per-request-spec-decode-metrics", "detailed"]
        for degree, flag in ((settings.tp, "--tensor-parallel-size"), (settings.dp, "--data-parallel-size")):
            if degree > 1:
                out += [flag, str(degree)]
        return out + (["--enable-expert-parallel"] if settings.ep > 1 else [])


def _speculation(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What an answer says of its drafts; None where nothing. Raises NotAnAnswer."""
    metrics = body.get("metrics")
    spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    return None if spec is None else object_of(spec, "speculative_decoding")
