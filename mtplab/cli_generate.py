"""`mtplab generate`: prompts in, text and acceptance out.

Turns options into one call of `mtplab.generate` and its result into lines or JSON; measures nothing itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import (
    AsJson,
    Calibration,
    CheckpointPath,
    Device,
    DraftCachePolicy,
    Exact,
    Exclude,
    MaxNewTokens,
    ModelFormat,
    TopK,
    TopP,
    emit,
    exclusion,
    move_bar,
    note,
    path_of,
    print_json,
    say,
    spinner,
    step_bar,
)

__all__ = ["generate"]


def generate(
    path: CheckpointPath,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; repeat for more. All run together, 64 at a time."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A .jsonl or .txt file of prompts, or a folder of .jsonl files.", parser=path_of
        ),
    ] = None,
    depth: Annotated[int, typer.Option(metavar="N", help="Draft tokens per round, 0 (plain decoding) to 16.")] = 3,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same tokens.")] = 0,
    quant_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="KV cache: none, int8, int4, fp8 (= fp8_e4m3), fp8_e5m2, turboquant, or lmdeploy's number; int8/int4 "
            "for K and V apart, fp8:calibrated for scales, int8@3 to keep layer 3 unquantised.",
        ),
    ] = "none",
    draft_quant_policy: DraftCachePolicy = None,
    calibration: Calibration = None,
    draft_sampling: Annotated[str, typer.Option(metavar="HOW", help="greedy or sampled drafts.")] = "greedy",
    exclude: Exclude = None,
    model_format: ModelFormat = None,
    device: Device = "cpu",
    exact: Exact = True,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with speculative decoding and show what the draft head was worth.

    The output at temperature 0 is that of plain decoding, whatever the depth; the acceptance says how many
    rounds it took. Printed: each text, acceptance per draft position, and what weights and caches weigh.

    \b
    Examples:
      mtplab generate data/tiny-qwen3_5 --prompt "Once upon a time" --depth 3
      mtplab generate data/tiny-qwen3_5-fp8 --prompt "def add(a, b):" --quant-policy int8 --depth 5
      mtplab generate data/tiny-qwen3_5 --prompt "The sea" --model-format fp8 --exclude 'mtp.*' --json
      mtplab generate data/tiny-qwen3_5 --prompts data/prompts --temperature 0.7 --top-p 0.9 --seed 1
    """
    from mtplab.checkpoint import open_checkpoint
    from mtplab.errors import ConfigError
    from mtplab.study.grid import exclusion_remark, weight_format
    from mtplab.study.prompts import calibration_ids, load_prompts

    if not prompt and prompts is None:
        raise ConfigError("there is nothing to continue; give --prompt TEXT or --prompts FILE")
    given = [item.text for item in load_prompts(list(prompt)).prompts] if prompt else []
    if prompts is not None:
        given += [item.text for item in load_prompts(prompts).prompts]
    kept = exclusion("--exclude", *(exclude or ()))
    opened = open_checkpoint(path)
    model_format = weight_format(opened, model_format, kept)
    with spinner(f"loading {path}"):
        from mtplab.decode import generate as run
        from mtplab.models import load_model

        model = load_model(
            opened,
            device=device,
            exclude=kept,
            quant_policy=quant_policy,
            draft_quant_policy=draft_quant_policy,
            model_format=model_format,
            exact=exact,
        )
    with step_bar("generating") as bar:
        generation = run(
            model,
            given,
            depth=depth,
            calibration=calibration_ids([quant_policy, draft_quant_policy], model.encode, calibration),
            temperature=temperature,
            seed=seed,
            max_new_tokens=max_new_tokens,
            top_k=top_k,
            top_p=top_p,
            draft_sampling=draft_sampling,
            on_round=lambda progress: move_bar(bar, progress.tokens_done, progress.tokens_total),
        )
    document = _document(path, model, given, generation)
    remark = exclusion_remark(model.checkpoint, model.plan, kept)
    if remark:
        note(remark)
    if as_json:
        print_json(document)
    else:
        _print(document)


def _document(path: Path, model: Any, given: list[str], generation: Any) -> dict[str, Any]:
    """The result as JSON-ready values; counters carry vLLM's names."""
    draft_bytes = model.plan.loaded_nbytes("draft")
    stats = generation.stats
    return {
        "checkpoint": path.resolve().name,
        "settings": generation.settings,
        "prompts": [
            {"prompt": prompt, "text": text, "tokens": list(tokens), "acceptance": _acceptance(its)}
            for prompt, text, tokens, its in zip(
                given, generation.texts, generation.tokens, generation.per_prompt, strict=True
            )
        ],
        "acceptance": {"depth": generation.depth, **_acceptance(stats), **stats.counters()},
        "memory": {
            "target_weight_bytes": model.plan.loaded_nbytes() - draft_bytes,
            "draft_weight_bytes": draft_bytes,
            **generation.memory,
        },
        "seconds": generation.decode_seconds,
        "prefill_seconds": generation.prefill_seconds,
        "tokens_per_second": generation.tokens_per_second,
    }


def _acceptance(stats: Any) -> dict[str, Any]:
    from mtplab.study.row import counts_of

    return {**counts_of(stats), "conditional": stats.conditional}


def _print(document: dict[str, Any]) -> None:
    from mtplab.report.text import human_bytes, plain
    from mtplab.study.hint import faint_draft
    from mtplab.study.words import cache_words

    for number, item in enumerate(document["prompts"], start=1):
        say(f"── prompt {number} of {len(document['prompts'])}, {len(item['tokens'])} tokens ──")
        # what the model added stands out, where there is a terminal to show it
        before, after = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
        emit(before + plain(item["prompt"]) + after + plain(item["text"]))
        say()
    found, memory = document["acceptance"], document["memory"]
    length = found["acceptance_length"]
    say(
        f"acceptance length {'–' if length is None else f'{length:.3f}'} · depth {found['depth']} · "
        f"{found['rounds']} rounds · {found['accepted']} of {found['drafted']} drafts accepted"
    )
    if found["per_position"]:
        say("  all up to draft j  " + _by_position(found["per_position"]))
        say("  draft j given 1…j-1 " + _by_position(found["conditional"]))
    hint = faint_draft(found["per_position"], found["rounds"])
    if hint:
        say(f"  {hint}")
    say(
        f"weights: target with embedding and head {human_bytes(memory['target_weight_bytes'])}, "
        f"draft {human_bytes(memory['draft_weight_bytes'])}"
    )
    say(
        f"KV cache as deployed: {cache_words(memory['quant_policy'])} {memory['kv_bytes_per_token']} B a token, "
        f"draft {cache_words(memory['draft_quant_policy'])} {memory['draft_kv_bytes_per_token']} B a token, "
        f"recurrent state {human_bytes(memory['state_bytes'])} a sequence"
    )
    say("  bytes a token by layer, the draft's last: " + " ".join(map(str, memory["layers"])))
    speed = document["tokens_per_second"]
    say(
        f"time: {document['seconds']:.2f} s decoding, {document['prefill_seconds']:.2f} s prompts"
        + ("" if speed is None else f", {speed:.0f} tokens/s")
    )


def _by_position(shares: list[float | None]) -> str:
    return " ".join(
        f"{j}: {'–' if share is None else f'{100 * share:.1f} %'} " for j, share in enumerate(shares, start=1)
    ).rstrip()
