"""How wide our Triton kernels make tiles of keys and of values, so that the assembler gets them right."""


def padded(dim: int) -> int:
    """Columns of a tile alone: the least power of two that holds them, and what a matrix unit takes."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of a tile of keys and of a tile of values: powers of two, and the narrower as wide as the other, up to 64.

    The order of a tile in shared memory goes by its width, up to 64 columns. Where elements are loaded one by one, as under strides of no
    multiple of 16, tiles take each other's place. If their orders differ, ptxas (12.8, which Triton 3.6 brings along; not 12.9) may
    never write the register from which it makes the address of the second order: results are garbage, or the access is illegal.
    """
    width, width_v = padded(head_dim), padded(head_dim_v)
    least = min(64, max(width, width_v))
    return max(width, least), max(width_v, least)
