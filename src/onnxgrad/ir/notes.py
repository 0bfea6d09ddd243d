"""Notes that a node or a value has, read without making room for them.

``onnx_ir`` allocates an empty store whenever `meta` or `metadata_props` is read. Few nodes have notes, but all are
asked: empty stores would be half of the objects of a derived graph.
"""

from __future__ import annotations

from operator import attrgetter

import onnx_ir as ir

_HELD = {"_metadata", "_metadata_props"} <= set(ir.Node.__slots__) & set(ir.Value.__slots__)

#: The `metadata_props` of a node or a value, which are saved with it; None or empty if it has none.
properties = attrgetter("_metadata_props" if _HELD else "metadata_props")
#: The `meta` of a node or a value; None or empty if it has none.
notes = attrgetter("_metadata" if _HELD else "meta")
#: The note of a factor that counts as 0 if it is not finite and the cotangent is 0.
SETTLED = "onnxgrad.settled"
