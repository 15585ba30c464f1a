"The web site, for Sphinx: `make site` reads the committed notebooks and pages where they lie and executes nothing"
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here))

project, copyright = 'gpubench', '2026 onwards, the gpubench authors'
extensions = ['myst_nb', 'pages', 'predict']
root_doc = 'README'
include_patterns = ['*.md', 'nbs/[0-9]*.ipynb', 'nbs/practitioner.ipynb', 'nbs/*/[0-9]*.ipynb', 'nbs/labs/**.ipynb', 'nbs/labs/**.md', 'benchmarks/**.md', 'benchmarks/**.ipynb']
exclude_patterns = ['.*', 'build', 'dist', 'runs', '**/.ipynb_checkpoints', 'nbs/labs/functions.ipynb']

nb_execution_mode = 'off'
nb_render_markdown_format = 'myst'                   # tables in an output are tables of the page
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
suppress_warnings = ['myst.header']                  # a function's heading is of the third level wherever it stands

html_theme = 'furo'
html_title = 'gpubench'
html_math_renderer = 'mathml'                        # of `pages`: MathJax would come from elsewhere
html_static_path, html_css_files = ['static'], ['site.css']
templates_path = ['templates']
html_sidebars = {'**': [f'sidebar/{o}.html' for o in ('brand', 'search', 'scroll-start', 'predict', 'navigation', 'scroll-end')]}
html_copy_source = html_show_sphinx = False
html_show_search_summary = False                     # excerpts would be fetched, which a page from disk may not
html_theme_options = dict(source_repository='https://github.com/gpubench/gpubench', source_branch='main',
                          source_directory='')
