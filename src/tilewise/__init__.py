"""tilewise: exact softmax attention for PyTorch, computed on tiles."""

from . import ops_jvp as _ops_jvp  # noqa: F401 (registers an operator)
from .api import attention, dropout_mask, explain, plan
from .capabilities import CAPABILITIES, Capability
from .errors import AttentionError, BackendBroken, BackendRefused, InvalidInput, Reason
from .masks import chunked, documents, key_padding, prefix_lm, spans
from .merge import merge
from .problem import Problem
from .reference import reference
from .second_pass import attention_weights, column_sums
from .spec import Spec, causal, full, window
from .terms import alibi, bias, dense, dropout, row_intervals, segments, sink, softcap

__version__ = "0.1.0"

__all__ = [
    "CAPABILITIES",
    "AttentionError",
    "BackendBroken",
    "BackendRefused",
    "Capability",
    "InvalidInput",
    "Problem",
    "Reason",
    "Spec",
    "alibi",
    "attention",
    "attention_weights",
    "bias",
    "causal",
    "chunked",
    "column_sums",
    "dense",
    "documents",
    "dropout",
    "dropout_mask",
    "explain",
    "full",
    "key_padding",
    "merge",
    "plan",
    "prefix_lm",
    "reference",
    "row_intervals",
    "segments",
    "sink",
    "softcap",
    "spans",
    "window",
]
