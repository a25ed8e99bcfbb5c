"""SVDQuant W4A4 for kitchen: the ``svdquant_w4a4`` format, loaded by kitchen_core through its entry point."""
