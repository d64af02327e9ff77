"""llama.cpp: its counters, its own `/completion` and `llama-server`, with a GGUF that is there.

A round is counted with what it accepted, no bonus among it. A request's last drafts are shortened to what its budget
leaves, so the budget cuts nothing; where one token is left it is a step without a draft, which is no round. The end of
a text cuts off drafts that were counted as accepted. Counts are added when a request ends, and written with six digits.

An answer has what it drafted and accepted, in all and not by position. `ignore_eos` forbids the tokens that end a text
here, where others let them pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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
from mtplab.engines.measured import Counts
from mtplab.engines.settings import Launch

__all__ = ["LlamaCpp"]

_CACHE_FLAGS = ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v")
_DRAFT_CACHE_FLAGS = (
    *("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
    *("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
)
_UNQUANTISED = ("f32", "f16", "bf16")
_ANY_SEED = 2**32 - 1  # stands for a seed of its own choice


class LlamaCpp(Engine):
    """`llama-server`."""

    name = "llamacpp"
    title = "llama.cpp"
    version = "b11549"
    sources = (
        "tools/server/server-task.cpp: server_task_result_metrics::to_metrics, names and digits",
        "tools/server/server-context.cpp: what a verification counts and drafts near the end; when counts are added",
        "tools/server/server-schema.cpp: what a completion takes",
        "common/arg.cpp: options",
        "all in the tree of xllamacpp 2026.10.11549, and seen in its server's answers",
    )
    prefixes = ("llamacpp:",)
    figures = Figures(
        rounds="llamacpp:spec_decode_num_drafts_total",
        drafted="llamacpp:spec_decode_num_draft_tokens_total",
        accepted="llamacpp:spec_decode_num_accepted_tokens_total",
        positions=("llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "position"),
        requests=None,
        prompt_tokens="llamacpp:prompt_tokens_total",
        generation_tokens="llamacpp:tokens_predicted_total",
        busy=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        plain_steps=True,
        digits=6,
        shortens=True,
        all_positions=True,
    )
    metrics_flag = "--metrics"
    completions_path = "/completion"
    about_paths = ("/props", "/slots")
    tokenize_path = "/tokenize"
    # its own order, and penalties and cuts by default
    idle: ClassVar[Mapping[str, Any]] = {
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": ["temperature", "top_k", "top_p"],
    }

    program = ("llama-server",)
    key_variable = "LLAMA_API_KEY"
    unset = ("LLAMA_ARG_", "LLAMA_API_KEY")
    caches: ClassVar[Mapping[str, str]] = {"none": "f16", "int8": "q8_0", "int4": "q4_0"}
    draft_cache = True
    reserved = (
        *("-m", "--model", "-mu", "--model-url", "-hf", "--hf-repo", "-a", "--alias", "--host", "--port"),
        *("--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file", "--api-prefix", "--metrics"),
        *("--cache-prompt", "--cache-reuse", "-cram", "--cache-ram", "-np", "--parallel", "-c", "--ctx-size"),
        *("--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"),
        *("--spec-synth-len", "--spec-synth-rates"),
    )

    def known(self, about: Mapping[str, Any], samples: Samples) -> Known:
        props, slots = (about.get(path) for path in self.about_paths)
        version = props.get("build_info") if isinstance(props, dict) else None
        # the positions are there once a request has drafted; its slots say whether any will
        depth = positions_of(samples, self.figures)
        if depth is None and isinstance(slots, list) and slots:
            drafts = [slot.get("speculative") for slot in slots if isinstance(slot, dict)]
            depth = 0 if drafts and not any(each is not False for each in drafts) else None
        return Known(version=version if isinstance(version, str) else None, depth=depth)

    def request(self, model: str, ids: Sequence[int], sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        return {
            "prompt": list(ids),
            "n_predict": sampling.max_new_tokens,
            **self.chosen(sampling, seed % _ANY_SEED),
            "ignore_eos": sampling.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }

    def answer(self, body: Any, depth: int) -> Answer:
        body = object_of(body, "answer")
        ids, completion = whole_numbers(body.get("tokens"), "tokens"), count_of(body, "tokens_predicted")
        if len(ids) != completion:
            raise NotAnAnswer(f"it has {len(ids)} ids, and tokens_predicted is {completion}")
        counts = self.own_counts(body, {}, completion, depth)
        return Answer(text_of(body, "content"), ids, count_of(body, "tokens_evaluated"), completion, counts)

    def counts(self, body: Mapping[str, Any], choice: Mapping[str, Any], tokens: int, depth: int) -> Counts | None:
        """None where the end of the text came before the budget's: how much of the last round it cut is not said."""
        if body.get("stop_type") != "limit":
            return None
        timings = object_of(body.get("timings"), "timings")
        if "draft_n" not in timings:  # nothing was drafted
            return None
        drafted, accepted = count_of(timings, "draft_n"), count_of(timings, "draft_n_accepted")
        rounds = tokens - accepted
        if not accepted <= drafted <= max(0, rounds) * depth:
            raise NotAnAnswer(f"it drafted {drafted} and accepted {accepted} for {tokens} tokens, at depth {depth}")
        return Counts(tokens, rounds, drafted, accepted, None)

    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        return {"content": text, "add_special": False}

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        for degree in ("tp", "ep", "dp"):
            if getattr(settings, degree) > 1:
                return (
                    f"{degree} {getattr(settings, degree)}: {self.title} divides a model by options of its own; give "
                    "arguments such as ('--split-mode', 'row') in a Launch"
                )
        if settings.served is None:
            return f"{self.title} reads no checkpoint but a GGUF: name the file as served of a Launch"
        for policy, flags, setting in (
            (wanted.quant_policy, _CACHE_FLAGS, "quant_policy"),
            (wanted.draft_quant_policy, _DRAFT_CACHE_FLAGS, "draft_quant_policy"),
        ):
            for flag, word in _options(settings.arguments, flags):
                if policy != "none" or word not in _UNQUANTISED:
                    return (
                        f"arguments hold {flag} {word!s:.20} and {setting} is {policy}: give the policy alone, or "
                        f"{setting} none and one of {', '.join(_UNQUANTISED)}"
                    )
        return super().refusal(wanted, settings)

    def remark(self, wanted: Wanted) -> str | None:
        if {wanted.quant_policy, wanted.draft_quant_policy if wanted.depth else "none"} & {"int8", "int4"}:
            return (
                "llama.cpp's q8_0 and q4_0 are symmetric, by blocks of 32; mtplab's int8 and int4 by row, with a zero"
            )
        return None

    def arguments(self, wanted: Wanted, settings: Launch, name: str, port: int) -> list[str]:
        slots = settings.limits.concurrency
        out = ["-m", settings.served or wanted.served, "--alias", name, "--host", settings.host, "--port", str(port)]
        out += ["-np", str(slots), "-c", str(slots * wanted.context), "--metrics", "--no-cache-prompt", "-cram", "0"]
        if wanted.quant_policy != "none":
            out += ["-ctk", self.caches[wanted.quant_policy], "-ctv", self.caches[wanted.quant_policy]]
        if wanted.depth:
            # by default it drafts only what it thinks likely in some builds
            out += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(wanted.depth)]
            out += ["--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
            if wanted.draft_quant_policy != "none":
                draft = self.caches[wanted.draft_quant_policy]
                out += ["-ctkd", draft, "-ctvd", draft]
        return out


def _options(arguments: Sequence[str], flags: Sequence[str]) -> list[tuple[str, str | None]]:
    """The options among the arguments, with the words after them or after an equals sign."""
    found = []
    for place, argument in enumerate(arguments):
        flag, equals, word = argument.partition("=")
        if flag in flags:
            after = arguments[place + 1] if place + 1 < len(arguments) else None
            found.append((flag, word if equals else after))
    return found
