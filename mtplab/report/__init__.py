"""What a study looks like: figures, the explorer, panels for Jupyter, and one self-contained HTML file.

Reads results and plans; measures nothing. Each name is imported when it is first asked for, so that a
report can be rendered without widgets and a figure drawn without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mtplab.drawing import set_drawing

_WHERE = {
    "Picture": "picture",
    "acceptance_by_depth": "figures",
    "acceptance_by_position": "figures",
    "break_even": "cost_figure",
    "checkpoint_map": "maps",
    "bytes_by_part": "maps",
    "SweepExplorer": "explorer",
    "ModuleTree": "module_tree",
    "Panel": "panels",
    "SweepPanel": "sweep_panel",
    "CheckpointPanel": "checkpoint_panel",
    "AuditPanel": "audit_panel",
    "GemmPanel": "gemm_panel",
    "pareto": "exclusion_figures",
    "sensitivity_bars": "exclusion_figures",
    "sensitivity_table": "exclusion_figures",
    "estimate_check": "exclusion_figures",
    "AcceptancePanel": "acceptance_panel",
    "acceptance_chart": "acceptance_figures",
    "CachePanel": "cache_panel",
    "cache_bytes_and_cost": "cache_figures",
    "cache_by_context": "cache_figures",
    "cache_table": "cache_figures",
    "draft_cache_grid": "cache_figures",
    "estimate_table": "exclusion_figures",
    "AdvisePanel": "advise_panel",
    "speedup_by_depth": "advise_figures",
    "best_depth_map": "advise_figures",
    "lengths_by_depth": "advise_figures",
    "advice_table": "advise_table",
    "published_table": "advise_table",
    "round_parts": "advise_figures",
    "granularity_errors": "gemm_figures",
    "number_errors": "gemm_figures",
    "roofline": "gemm_figures",
    "RoundsView": "rounds",
    "Conclusion": "conclusion",
    "Finding": "findings",
    "Findings": "findings",
    "acceptance_table": "rows_table",
    "plan_summary": "plan_tables",
    "size_against": "plan_tables",
    "NotebookProgress": "progress",
    "render_report": "html",
    "compare": "comparison",
    "Comparison": "comparison",
    "differences_by_depth": "comparison_figure",
    "write_comparison": "comparison_page",
    "write_results": "results_page",
    "resolve_path": "paths",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mtplab.report' has no attribute {name!r}")
    return getattr(import_module(f"mtplab.report.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


def _draw(view: Any) -> Any:
    from mtplab.report.acceptance_figures import acceptance_chart

    return acceptance_chart(view)


# study knows no figures: this is how `AcceptanceSet.plot` finds one
set_drawing(_draw)
