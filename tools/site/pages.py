"What the site changes in the pages before Sphinx parses them: side bar, the library's reference, no remote images"
import ast, re, shutil, textwrap
from pathlib import Path

import nbformat
from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from nbformat.v4 import new_markdown_cell

chapters = {'For practitioners': ['nbs/practitioner'],
            'The course': ['nbs/labs/index', 'nbs/labs/[0-9]*', 'nbs/labs/questions', 'nbs/labs/teachers', 'nbs/labs/answers', 'nbs/labs/records/README'],
            'Going deeper': ['nbs/labs/deeper/*'],
            'Results': ['benchmarks/results/README', 'benchmarks/README', 'benchmarks/containers/README'],
            'Set-up': ['CONTAINERS', 'CONTAINERS_MORE', 'CLUSTER'],
            **{f'The library: {o}': [f'nbs/{o}/*'] for o in ('ground', 'data', 'watch', 'step', 'run', 'show', 'course')},
            'The library: on top': ['nbs/[0-9]*'],
            'The project': ['CONTRIBUTING', 'CHANGELOG']}
remote_image = re.compile(r'!\[([^]]*)\]\(https?://[^)]*\)')
predict_link = re.compile(r'\[([^]]*)\]\(https://gpubench\.github\.io/gpubench/(predict\.html)\)')
option = re.compile(r'^\s*#\|\s*(\w+).*\n?', re.M)       # a line such as `#| export`
progress_bar = 'application/vnd.jupyter.widget-view+json'
kinds = ast.FunctionDef, ast.ClassDef

def has_page(srcdir, name):
    return any(o.suffix in ('.ipynb', '.md') for o in Path(srcdir).glob(f'{name}.*'))

def contents(srcdir, caption, names):
    "A chapter of the side bar, with the names that have a page; there may be none"
    names = [o for o in names if has_page(srcdir, o)]
    if not names: return ''
    return '\n```{toctree}\n:hidden:\n:glob:\n:caption: %s\n%s\n```\n' % (caption, '\n'.join(names))

def outline(node, lines):
    "A definition without its code: signature, fields, public methods with their docstrings"
    start = min(o.lineno for o in [node, *node.decorator_list])
    yield from lines[start-1:max(node.body[0].lineno-1, node.lineno)]
    for o in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(o, ast.AnnAssign): yield from lines[o.lineno-1:o.end_lineno]
        if isinstance(o, ast.FunctionDef) and (o.name=='__init__' or o.name[0]!='_' and ast.get_docstring(o)):
            yield from outline(o, lines)
            if ast.get_docstring(o): yield from lines[o.body[0].lineno-1:o.body[0].end_lineno]

def full_name(node):
    "Its name, with the class that `@patch` adds it to"
    is_patch = any(ast.unparse(o).partition('(')[0]=='patch' for o in node.decorator_list)
    return f'{ast.unparse(node.args.args[0].annotation)}.{node.name}' if is_patch else node.name

def reference(source):
    "Markdown of an exported cell's public functions and classes: heading, docstring, signature with its comments"
    for node in ast.parse(source).body:
        if isinstance(node, kinds) and node.name[0]!='_' and ast.get_docstring(node):
            code = textwrap.dedent('\n'.join(outline(node, source.splitlines())))
            yield f'### {full_name(node)}\n\n{ast.get_docstring(node)}\n\n```python\n{code}\n```\n'

def pages_of(cell):
    "The cells that a reader sees instead of a notebook's `cell`"
    options = option.findall(cell.source) if cell.cell_type=='code' else []
    if 'install' in cell.metadata.get('tags', []) or {'hide', 'default_exp', 'exporti'} & {*options}: return []
    if 'export' in options:
        entries = '\n'.join(reference(option.sub('', cell.source)))
        return [new_markdown_cell(entries)] if entries else []
    if cell.cell_type=='code':
        cell.source = option.sub('', cell.source)
        cell.outputs = [o for o in cell.outputs if progress_bar not in o.get('data', {})]
        title = re.search(r"title ?= ?f?'([^']+)", cell.source)
        alt = re.sub(r'{.*?}', '…', title[1]) if title else 'What the code above draws'
        stored = [o.metadata.get('image/png', {}).get('alt') for o in cell.outputs if 'metadata' in o]
        alt = '. '.join(filter(None, stored)) or alt
        cell.metadata['mystnb'] = dict(image=dict(alt=alt))
    return [cell]

def change(app, docname, source):
    "Sphinx's `source-read`: the text of a page before it is parsed"
    source[0] = remote_image.sub(r'\1', source[0])
    root = '../'*docname.count('/')
    source[0] = predict_link.sub(rf'<a href="{root}\2">\1</a>', source[0])    # to a page that isn't made from a document
    if docname==app.config.root_doc: source[0] += ''.join(contents(app.srcdir, *o) for o in chapters.items())
    if app.env.doc2path(docname).suffix=='.ipynb':
        nb = nbformat.reads(source[0], 4)
        nb.metadata.pop('widgets', None)
        nb.cells = [p for o in nb.cells for p in pages_of(o)]
        source[0] = nbformat.writes(nb)

def add_index(app, error):
    "What a web server and a reader of the folder open first"
    if not error: shutil.copy(Path(app.outdir, f'{app.config.root_doc}.html'), Path(app.outdir, 'index.html'))

def mathml(display):
    "A visitor of formulas, which browsers draw themselves"
    def visit(writer, node):
        writer.body.append(convert(node.astext(), display=display))
        raise SkipNode
    return visit, None

def setup(app):
    app.connect('source-read', change)
    app.connect('build-finished', add_index)
    app.add_html_math_renderer('mathml', mathml('inline'), mathml('block'))
    return dict(parallel_read_safe=True, parallel_write_safe=True)
