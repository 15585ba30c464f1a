"""README.md from nbs/index.ipynb, with nbconvert (nbdev-readme would need Quarto)

    readme.py [--check]     write it, or check that it is up to date"""
import re, sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

root = Path(__file__).resolve().parent.parent
link = re.compile(r'(\]\(|src="|href=")(?!\w+:|#|/)([^)"\s]+)')   # the target of a relative link or image
option = re.compile(r'^\s*#\|\s*(\w+).*\n?', re.M)               # a line such as `#| slow`

def from_root(match, folder):
    "A link in a notebook in `folder`, as README.md needs it, one folder up"
    start, target = match.groups()
    if not (folder/target.partition('#')[0]).exists():
        raise ValueError(f"The notebook links to {target!r}, which is not there. Write the path relative to {folder.name}/.")
    return start + (target[3:] if target.startswith('../') else f'{folder.name}/{target}')

def readme_text(notebook):
    "README.md's text: the cells of `notebook` except raw and `#| hide` ones, with links relative to the checkout"
    nb = nbformat.read(notebook, 4)
    nb.metadata.language_info = dict(name='python')          # of the code's fences
    nb.cells = [o for o in nb.cells if o.cell_type!='raw' and not (o.cell_type=='code' and 'hide' in option.findall(o.source))]
    for o in nb.cells:
        if o.cell_type=='code': o.source = option.sub('', o.source)
    text, resources = MarkdownExporter().from_notebook_node(nb)
    if resources['outputs']:
        raise ValueError(f"{notebook} shows figures ({', '.join(resources['outputs'])}) that README.md can't contain. "
                         "Save them under benchmarks/results/ and link to them.")
    return link.sub(lambda m: from_root(m, notebook.parent), text).strip() + '\n'

def main():
    text, file = readme_text(root/'nbs'/'index.ipynb'), root/'README.md'
    if '--check' not in sys.argv: file.write_text(text, encoding='utf-8')
    elif file.read_text(encoding='utf-8')!=text: sys.exit('README.md is out of step with nbs/index.ipynb. Run `make readme`')

if __name__=='__main__': main()
