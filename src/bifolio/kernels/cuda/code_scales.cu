// Values of the constant SCALES: how the factors of groups of codes are held (`triton/row_layouts.py`).
enum { HALVES, HALF_PAIRS, BYTE_PAIRS, SIGNED_BYTES, EXPONENTS };
