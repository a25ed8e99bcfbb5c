"""AWQ W4A16 for kitchen: the ``awq_w4a16`` format, loaded by kitchen_core through its entry point."""
