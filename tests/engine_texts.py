"""Recorded words of serving engines, in `tests/engines`: metrics before and after a run, and answers.

The first lines of a text, and `about` of the answers, say what they were recorded from, or that they were not.
`exposed` writes figures of any rounds, as each engine counts them.
"""

import json
from pathlib import Path

from mtplab.engines.engine import Answer
from mtplab.engines.figures import Look, look, samples_of
from mtplab.engines.registry import ENGINES

TEXTS = Path(__file__).parent / "engines"
SERVED = ("vllm", "sglang", "lmdeploy", "tensorrt_llm", "llamacpp")


def samples(name: str) -> dict:
    return samples_of((TEXTS / f"{name}.txt").read_text())


def looked(engine: str, moment: str) -> Look:
    return look(ENGINES[engine].figures, samples(f"{engine}-{moment}"))


def recorded(engine: str) -> dict:
    return json.loads((TEXTS / f"{engine}.json").read_text())


def answers(*tokens: int, prompt: int = 8) -> list[Answer]:
    return [Answer("", None, prompt, each, None) for each in tokens]


NAMES = {
    "vllm": ("vllm:", "generation_tokens_total", "num_drafts_total", "num_draft_tokens_total"),
    "lmdeploy": ("lmdeploy:", "generation_tokens_total", "num_drafts_total", "num_draft_tokens_total"),
    "llamacpp": ("llamacpp:", "tokens_predicted_total", "num_drafts_total", "num_draft_tokens_total"),
}


def exposed(engine: str, depth: int, generated: int, drafts: list[tuple[int, int]]) -> str:
    """The engine's figures after rounds that drafted and accepted so much each."""
    places = [sum(a > j for _, a in drafts) for j in range(depth)]
    if engine == "tensorrt_llm":
        lines = [f"trtllm_generation_tokens_total {generated}"]
        for j, accepted in enumerate(places):
            lines.append(f'trtllm_spec_decode_drafted_tokens_total{{token_position="{j}"}} {len(drafts)}')
            if accepted:
                lines.append(f'trtllm_spec_decode_accepted_tokens_total{{token_position="{j}"}} {accepted}')
        return "\n".join(lines) + "\n"
    if engine == "sglang":
        return f"sglang:generation_tokens_total {generated}\nsglang:spec_verify_calls_total {len(drafts)}\n"
    prefix, tokens, rounds, drafted = NAMES[engine]
    lines = [f"{prefix}{tokens} {generated}", f"{prefix}spec_decode_{rounds} {len(drafts)}"]
    lines.append(f"{prefix}spec_decode_{drafted} {sum(d for d, _ in drafts)}")
    lines.append(f"{prefix}spec_decode_num_accepted_tokens_total {sum(places)}")
    name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
    return "\n".join(lines + [f'{name}{{position="{j}"}} {n}' for j, n in enumerate(places)]) + "\n"


def generated(engine: str, depth: int, tokens: int, luck: list[int]) -> tuple[list[tuple[int, int]], int]:
    """(drafted, accepted) of each round of a text of so many tokens, and its steps without drafts."""
    left, drafts, plain, turn = tokens - 1, [], 0, 0
    while left:
        drafted = min(depth, left - 1) if engine == "llamacpp" else depth
        if not drafted:
            plain, left = plain + 1, left - 1
            continue
        accepted = min(luck[turn % len(luck)], drafted)
        drafts.append((drafted, accepted))
        left, turn = max(0, left - accepted - 1), turn + 1
    return drafts, plain
