"""Published figures, as their authors gave them: theirs, not ours, and on their machines.

MagiAttention's context-parallel benchmark (its blog, 2026): H100, 8K tokens a GPU, 64:8 heads of 128, bf16, FlashAttention-3, documents of
at most a quarter of the sequence, TFLOP/s per GPU of the slowest rank at 8, 16, 32 and 64 GPUs. Read off its plots: within about 2.
"""

_ORDER = ("ulysses", "ring_p2p", "ring_allgather", "usp", "loongtrain")

_FIGURES = {
    ("full", "fwd"): ((599, 567, 575, 613), (504, 528, 509, 506), (598, 586, 579, 576), (572, 596, 584, 598), (571, 594, 589, 597)),
    ("full", "bwd"): ((570, 570, 576, 571), (490, 512, 507, 499), (527, 536, 533, 529), (564, 582, 579, 574), (563, 571, 565, 570)),
    ("causal", "fwd"): ((595, 550, 574, 579), (415, 448, 444, 440), (595, 585, 586, 572), (586, 582, 587, 580), (587, 579, 573, 582)),
    ("causal", "bwd"): ((576, 554, 567, 579), (426, 468, 463, 451), (510, 519, 516, 517), (566, 563, 568, 565), (561, 542, 540, 554)),
    ("full_document", "fwd"): ((384, 299, 278, 253), (154, 128, 86, 51), (381, 381, 317, 243), (367, 365, 367, 285), (365, 366, 307, 287)),
    ("full_document", "bwd"): ((421, 394, 373, 341), (156, 156, 96, 44), (225, 186, 119, 59), (416, 402, 367, 275), (411, 358, 270, 245)),
    ("causal_document", "fwd"): ((274, 194, 181, 158), (84, 64, 43, 24), (284, 288, 236, 175), (256, 247, 250, 187), (254, 247, 204, 188)),
    ("causal_document", "bwd"): ((328, 291, 273, 245), (94, 82, 53, 25), (175, 151, 99, 51), (320, 305, 280, 191), (316, 249, 176, 168)),
}

PUBLISHED: dict[tuple[str, str, str], tuple[int, ...]] = {
    (mask, direction, mechanism): figures
    for (mask, direction), rows in _FIGURES.items()
    for mechanism, figures in zip(_ORDER, rows, strict=True)
}
"""(mask, direction, mechanism) to TFLOP/s per GPU at 8, 16, 32 and 64 GPUs."""
