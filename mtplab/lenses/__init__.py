"""Engine lenses: how vLLM, SGLang, lmdeploy, TensorRT-LLM and transformers read one checkpoint's exclusion list.

Reads names and configs only, never values; loads no engine and no torch.
"""

from mtplab.lenses.base import Disagreement, Engine, Verdict, View
from mtplab.lenses.judge import Look
from mtplab.lenses.looks import Looks, lenses, look
from mtplab.lenses.recommend import recommended_exclusions

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
]
