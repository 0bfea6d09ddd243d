"""Settings of the documentation site: pages in Markdown, an API reference from the docstrings."""

from __future__ import annotations

import onnxgrad

project = "onnxgrad"
author = "the onnxgrad authors"
version = release = onnxgrad.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["README.md"]

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
# Pages link to files of the repository (examples, tests); on the site these are shown, not followed.
suppress_warnings = ["myst.xref_missing_file"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False
default_role = "code"

html_theme = "furo"
html_title = "onnxgrad"
html_static_path: list[str] = []
