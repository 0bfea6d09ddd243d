"""Why the node tests that are not in ``proven.txt`` are not: there is nothing to compare with, or no derivative."""

from __future__ import annotations

from fnmatch import fnmatchcase

#: Patterns of names.
REASONS = {
    "test_adam_multiple": "the reference evaluator takes one tensor only; tests/rules/test_optimizers.py has two",
    "test_affine_grid_*_expanded": "the ranks of a body that chooses between images and volumes by an If are not known",
    "test_bernoulli*": "a random sample has no derivative, and none can be compared",
    "test_linear_attention_*_expanded": "the body computes in float32; without it the same tests are proven",
    "test_melweightmatrix": "it computes in float32, and its derivative is 0",
    "test_range_*": "the length of the result changes with the operands at this point; tests/rules/test_generate.py",
    "test_reduce_*_empty_set*": "there is no element to differentiate by",
    "test_reduce_sum_empty_set_non_reduced_axis_zero": "there is no element",
    "test_reshape_allowzero_reordered": "there is no element",
    "test_resize_*_align_corners": "by scales, which runtimes read in two ways; refused",
    "test_resize_*_antialias": "by scales that set the width of a filter; refused",
    "test_split_zero_size_splits_*": "there is no element",
}


def reasons(name: str) -> list[str]:
    """The reasons listed for a node test."""
    return [reason for pattern, reason in REASONS.items() if fnmatchcase(name, pattern)]
