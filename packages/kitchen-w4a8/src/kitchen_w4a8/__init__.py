"""W4A8 and W6A8 linear layers for kitchen: the ``asym_w4a8_int8`` and ``w6a8_int8`` formats."""

__version__ = "0.1.0"
