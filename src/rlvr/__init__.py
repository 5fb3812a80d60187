"""rlvr: reinforcement learning from verifiable rewards for language models.

The public names, which `__init__.pyi` lists, are imported on first use, so that `import rlvr` is fast and pulls in no
torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
