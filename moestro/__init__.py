"""Moestro: measure, predict, plan, train and explain mixture-of-experts models.

The package imports nothing heavy: `import moestro` and `moestro --help` do not load torch.
"""

from moestro.errors import MoestroError

__version__ = "0.1.0"
__all__ = ["MoestroError", "__version__"]
