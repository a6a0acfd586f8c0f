"""Operations, one a file, each with one signature for every device. Know tensors and sizes, no layer and no model.

Every op takes a `Workspace` and a `StepShape` first, then tensors of maximal size, and writes into given tensors. The
step's tokens are the first `num_tokens` rows of a tensor over tokens, its sequences the first `num_seqs` of one over
sequences, its sampled rows the first `num_rows` of one over rows; what lies beyond is neither read nor written.

Each has a torch reference: the oracle for every other implementation, and the last resort. It may look at lengths that
lie in host memory; an implementation for a device must not. An op with a CUDA kernel lists the instances that a model
in a dtype may launch in its function `kernels`, and launches them where the workspace has them.
"""
