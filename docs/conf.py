"""Builds the pages of this folder into a site, by `sphinx-build -nW --keep-going docs FOLDER`."""

from ooc_embed import __version__

project = "ooc_embed"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Links to headings have the names that GitHub gives them.
myst_heading_anchors = 3

smartquotes_action = "D"  # dashes alone

# `name` in a docstring is a link. One that leads nowhere fails the build (-n), but for types of
# other packages, whose pages the build must not need.
default_role = "py:obj"
nitpick_ignore_regex = [("py:class", ".*")]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
napoleon_custom_sections = ["Shape"]
napoleon_use_param = False  # one entry may name several arguments
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"ooc_embed {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
