"""Checking of answers. The public names, which `__init__.pyi` lists, are imported on first use: `from rlvr.verifiers
import MathVerifier` needs neither torch nor SymPy, nor the other verifiers. rlvr.verifiers.builtin imports, and so
registers, all built-in verifiers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
