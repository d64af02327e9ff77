"""Engine lenses: how vLLM, SGLang, lmdeploy, TensorRT-LLM and transformers read one checkpoint's exclusion list.

Reads names and configs only, never values; loads no engine and no torch.
"""

from mtplab.checkpoint.lenses.base import Disagreement, Engine, Verdict, View
from mtplab.checkpoint.lenses.judge import Look
from mtplab.checkpoint.lenses.looks import Looks, lenses, look
from mtplab.checkpoint.lenses.recommend import recommended_exclusions
from mtplab.checkpoint.lenses.views import views_of

__all__ = [
    "Disagreement",
    "Engine",
    "Look",
    "Looks",
    "Verdict",
    "View",
    "lenses",
    "look",
    "recommended_exclusions",
    "views_of",
]
