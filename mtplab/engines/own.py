"""mtplab's own runner behind the same endpoint (`mtplab serve`): to try a study on a server with no engine installed.

Its rounds are those of `generate`: one a verification, no bonus and nothing beyond the end among the accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mtplab.engines.clean import key_of
from mtplab.engines.engine import Engine, Figures, Known, NotAnAnswer, Wanted, whole_numbers
from mtplab.engines.figures import Samples
from mtplab.engines.measured import Counts
from mtplab.engines.settings import Launch
from mtplab.quant.policy import resolve_policy

__all__ = ["Own"]


class Own(Engine):
    """`mtplab serve`."""

    name = "mtplab"
    title = "mtplab serve"
    version = "0.1.0"
    sources = ("mtplab/server: the same checkout",)
    prefixes = ("mtplab:",)
    figures = Figures(
        rounds="mtplab:spec_decode_num_drafts_total",
        drafted="mtplab:spec_decode_num_draft_tokens_total",
        accepted="mtplab:spec_decode_num_accepted_tokens_total",
        positions=("mtplab:spec_decode_num_accepted_tokens_per_pos_total", "position"),
        requests="mtplab:request_success_total",
        prompt_tokens="mtplab:prompt_tokens_total",
        generation_tokens="mtplab:generation_tokens_total",
        busy=("mtplab:num_requests_running", "mtplab:num_requests_waiting"),
        cut=False,
        all_positions=True,
    )
    about_paths = ("/version", "/server_info")
    tokenize_path = "/tokenize"
    program = ("mtplab", "serve")
    package = "mtplab"
    key_variable = "MTPLAB_SERVER_KEY"
    reserved = (
        *("--served-model-name", "--host", "--port", "--api-key-env", "--depth", "--quant-policy"),
        *("--draft-quant-policy", "--calibration", "--exclude", "--draft-exclude", "--model-format"),
    )
    draft_cache = True

    def known(self, about: Mapping[str, Any], samples: Samples) -> Known:
        version, told = (about.get(path) if isinstance(about.get(path), dict) else {} for path in self.about_paths)
        return Known(
            version=version.get("version"),
            depth=told.get("depth"),
            quant_policy=told.get("quant_policy"),
            draft_quant_policy=told.get("draft_quant_policy"),
            exclusions=_label(told.get("exclude"), told.get("draft_exclude")),
        )

    def request(self, model: str, ids: Any, sampling: Any, seed: int) -> dict[str, Any]:
        return super().request(model, ids, sampling, seed) | {"return_token_ids": True}

    def counts(self, body: Mapping[str, Any], choice: Mapping[str, Any], tokens: int, depth: int) -> Counts | None:
        spec = choice.get("spec_decode")
        if not isinstance(spec, dict):
            return None
        places = whole_numbers(spec.get("per_position"), "per_position")
        numbers = whole_numbers([spec.get(name) for name in ("rounds", "drafted", "accepted")], "counts")
        if len(places) != depth:
            raise NotAnAnswer(f"it counts {len(places)} positions at depth {depth}")
        return Counts(tokens, *numbers, places)

    def program_here(self) -> tuple[str, ...]:
        return sys.executable, "-m", "mtplab.cli", "serve"  # of this very mtplab, on the path or not

    def cache(self, policy: str) -> str | None:
        return None if resolve_policy(policy).calibrated else policy

    def arguments(self, wanted: Wanted, settings: Launch, name: str, port: int) -> list[str]:
        out = [wanted.served, "--served-model-name", name, "--host", settings.host, "--port", str(port)]
        out += ["--depth", str(wanted.depth), "--quant-policy", wanted.quant_policy]
        out += ["--draft-quant-policy", wanted.draft_quant_policy]
        return [*out, "--api-key-env", self.key_variable] if key_of(settings.key_variable) else out

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        for degree in ("tp", "ep", "dp"):
            if getattr(settings, degree) > 1:
                return f"{degree} {getattr(settings, degree)}: mtplab serve runs on one device"
        return super().refusal(wanted, settings)


def _label(exclude: Any, draft_exclude: Any) -> str | None:
    """Its exclusions as rows call them; None where they are those of its checkpoint, which may be any."""
    if not isinstance(exclude, str) or exclude == "published":
        return None
    return exclude if draft_exclude in (None, exclude) else f"{exclude} (draft: {draft_exclude})"
