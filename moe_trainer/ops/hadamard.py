"""Hadamard matrices (Sylvester's construction): entries 1 and -1, symmetric, H H = size * identity."""

import torch
from torch import Tensor


def hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix [size, size]; `size` is a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(x: Tensor) -> Tensor:
    """Apply the orthogonal Hadamard transform to the last dimension, a power of two; it preserves dot products."""
    size = x.shape[-1]
    return (x @ hadamard_matrix(size, x.dtype, x.device)) * size**-0.5  # factors of 1 and -1 are exact in every format
