"""How many operations and bytes a known load takes, by arithmetic alone.

Owns the formulas, so that a figure in the table can be checked by hand. Refuses to measure, and imports the standard
library only: the child that makes the loads may run under another interpreter than ours.
"""

PEAK_RATIO = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}
"""Dense peak of a type over the dense 16-bit peak: the same tensor pipes, other operand widths (NVIDIA datasheets of
A100, H100, B200: 156/312, 494.7/989.4, 1125/2250 TFLOP/s for TF32; 1978.9/989.4, 4500/2250 for FP8)."""
WARP = 32
MMA_FLOPS = 2 * 16 * 8 * 16
"""One warp's `mma.m16n8k16`: a product of 16 x 16 and 16 x 8 (PTX ISA, warp-level matrix instructions)."""


def product_flops(m: int, n: int, k: int) -> int:
    """Count a product of m x k and k x n: a multiplication and an addition for each of m*n*k terms."""
    return 2 * m * n * k


def mma_kernel_flops(*, blocks: int, threads: int, rounds: int, per_round: int) -> int:
    """Count a kernel whose warps issue `per_round` matrix instructions in each of `rounds` rounds."""
    return blocks * (threads // WARP) * rounds * per_round * MMA_FLOPS


def copy_bytes(size: int) -> int:
    """Count what a copy of `size` bytes within the device moves: each byte is read once and written once."""
    return 2 * size


def transformer_parameters(*, layers: int, hidden: int, vocabulary: int) -> int:
    """Count the weights that multiply: four attention matrices, an MLP four times as wide, and the output head.

    The embedding is looked up, not multiplied, and does not count.
    """
    return layers * (4 * hidden * hidden + 8 * hidden * hidden) + hidden * vocabulary


def training_flops_per_token(parameters: int, *, layers: int, heads: int, head_size: int, sequence: int) -> int:
    """Count forward and backward of one token: 6N + 12*L*H*Q*T (PaLM, appendix B), the attention in full.

    Full means that no position is masked: a causal kernel that skips the masked half does half of the second term.
    What a fused attention computes twice in its backward pass is not in it, for it advances no model.
    """
    return 6 * parameters + 12 * layers * heads * head_size * sequence
