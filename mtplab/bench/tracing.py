"""A trace against what it replaces: the plain decoding it rides on, and a run at each of its depths, at equal batch.

Counts first: a trace that differs from the runs at any depth is not timed. Knows nothing of how the report is printed.
"""

from __future__ import annotations

from pathlib import Path

from mtplab.bench.speed import Line
from mtplab.bench.timing import interleave
from mtplab.decode import generate
from mtplab.models import load_model
from mtplab.study.trace import trace

__all__ = ["DEPTHS", "tracing"]

DEPTHS = 8
# batch -> how many times as long as plain decoding a trace may take; and how many times faster than runs it is to be
_AT_MOST = {1: 1.3}
_AT_MOST_OTHERWISE, _FASTER = 2.5, 4.0


def tracing(path: Path, texts: list[str], tokens: int, rounds: int) -> list[Line]:
    """Depths 1 to 8 from one trace, greedy and exact, of the first prompt alone and of all at once.

    Ratios are times: of a trace to plain decoding, and of runs at each depth to a trace.
    """
    model = load_model(path)
    settings = {"max_new_tokens": tokens, "ignore_eos": True, "exact": True}
    lines = []
    for batch in dict.fromkeys((1, len(texts))):
        ids = [model.encode(text) for text in texts[:batch]]
        here = f"batch {batch}"
        found = trace(model, ids, DEPTHS, **settings).acceptance()
        runs = {depth: generate(model, ids, depth=depth, **settings) for depth in range(1, DEPTHS + 1)}
        wrong = [depth for depth, run in runs.items() if run.per_prompt != found.per_prompt(depth)]
        if wrong:
            lines.append(Line(f"{here}: trace", None, None, None, f"wrong at depths {wrong}, so not timed"))
            continue
        names = [
            f"{here}: {what}"
            for what in ("plain decoding", f"trace of depths 1 to {DEPTHS}", f"runs at depths 1 to {DEPTHS}")
        ]
        timings = interleave(
            {
                names[0]: (batch * tokens, lambda ids=ids: generate(model, ids, depth=0, **settings)),
                names[1]: (batch * tokens, lambda ids=ids: trace(model, ids, DEPTHS, **settings)),
                names[2]: (
                    DEPTHS * batch * tokens,
                    lambda ids=ids: [generate(model, ids, depth=k, **settings) for k in range(1, DEPTHS + 1)],
                ),
            },
            rounds,
        )
        plain, traced, ran = (timings[name] for name in names)
        bound = _AT_MOST.get(batch, _AT_MOST_OTHERWISE)
        lines.append(Line(names[0], plain, None, None))
        lines.append(Line(names[1], traced, traced.median / plain.median, bound, at_most=True))
        lines.append(Line(names[2], ran, ran.median / traced.median, _FASTER))
    return lines
