"""Layers: parameters and the op that applies them. Know their own sizes and names, no model's structure.

A layer is made from `LayerOptions` and sizes, says by `weight_targets(prefix)` which part of its memory each tensor of
a checkpoint fills, and is called with a `ForwardContext`. How a linear layer keeps its weight is its own affair: that
is where a quantised format or a share of a tensor-parallel weight comes in, chosen by the options.
"""
