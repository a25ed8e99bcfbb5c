"""Formats that exist, installed or not: the package that has each, its other names in files, its short name."""

KNOWN_FORMATS = {
    "int8_tensorwise": ("kitchen-int8", ("int8_rowwise",), "int8"),
    "asym_w4a8_int8": ("kitchen-w4a8", (), "w4a8"),
    "w6a8_int8": ("kitchen-w4a8", (), "w6a8"),
    "svdquant_w4a4": ("kitchen-svdquant", (), "svdquant"),
    "awq_w4a16": ("kitchen-awq", (), "awq"),
}
