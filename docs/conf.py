"""The settings of the site that `make docs` builds; everything is on this machine, so pages need no network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from paceenv import __version__

project = "paceenv"
author = "the authors of paceenv"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_pages"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["site_pages"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "paceenv"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_js_files = ["reach.js"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # its excerpts are fetched, which a browser refuses for files
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
