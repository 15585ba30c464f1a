"A lab has a core that fits into half an hour, and a surprise that comes soon"
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers import root

MAX_COLUMNS = 100                                    # of a line of code, in any lab
MAX_CELLS, MAX_WORDS = 40, 1600                      # of a lab; what goes beyond is in nbs/labs/deeper
SOON_WORDS, SOON_LINES = 300, 60                     # until the cell tagged `surprise` has run; the install cell isn't counted
labs = sorted((root/'nbs'/'labs').glob('[0-9]*.ipynb'))
all_labs = sorted((root/'nbs'/'labs').rglob('[0-9]*.ipynb'))

def tags(cell): return cell.metadata.get('tags', [])

def n_words(cells): return sum(len(o.source.split()) for o in cells if o.cell_type=='markdown')

def n_lines(cells): return sum(len(o.source.splitlines()) for o in cells if o.cell_type=='code' and 'install' not in tags(o))

def too_long(path):
    "What is too long in a lab"
    cells = nbformat.read(path, 4).cells
    ends = [i+1 for i,o in enumerate(cells) if 'surprise' in tags(o)]
    if len(ends)!=1: return [f'{len(ends)} cells tagged `surprise`']
    found = {'cells': (len(cells), MAX_CELLS), 'words': (n_words(cells), MAX_WORDS),
             'words before the surprise': (n_words(cells[:ends[0]]), SOON_WORDS),
             'lines before the surprise': (n_lines(cells[:ends[0]]), SOON_LINES)}
    return [f'{n} {k}, more than {most}' for k,(n,most) in found.items() if n>most]

@pytest.mark.parametrize('path', labs, ids=lambda o: o.stem)
def test_a_core_is_short(path): assert too_long(path)==[]

def wide_lines(path):
    return [l for o in nbformat.read(path, 4).cells if o.cell_type=='code' for l in o.source.splitlines() if len(l)>MAX_COLUMNS]

@pytest.mark.parametrize('path', all_labs, ids=lambda o: o.stem)
def test_lines_fit_on_a_screen(path): assert wide_lines(path)==[]

def test_a_long_lab_is_found(tmp_path):
    def lab(*cells):
        nbformat.write(new_notebook(cells=cells), tmp_path/'01_x.ipynb')
        return too_long(tmp_path/'01_x.ipynb')
    words, surprise = new_markdown_cell('word '*200), new_code_cell('x = 1\n'*60, metadata=dict(tags=['surprise']))
    install = new_code_cell('y = 2\n'*60, metadata=dict(tags=['install']))
    assert lab(words, install, surprise, *[words]*7)==[]
    assert lab(words, words, surprise, new_code_cell(''))==['400 words before the surprise, more than 300']
    assert lab(install, new_code_cell('z = 3'), surprise)==['61 lines before the surprise, more than 60']
    assert lab(surprise, *[words]*40)==['41 cells, more than 40', '8000 words, more than 1600']
    assert lab(words)==['0 cells tagged `surprise`']
