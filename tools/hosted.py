"Add the badges and the install cell for Colab and Kaggle to every lab, or update them: `python tools/hosted.py`"
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

labs = Path(__file__).resolve().parent.parent/'nbs'/'labs'
repo = 'gpubench/gpubench'

# torch, torchvision and the packages of the running kernel are pinned to the host's versions,
# so pip either fits everything else to them or gives up
install = f'''# On Colab and Kaggle only: install gpubench and the labs' records. torch and the kernel stay.
import os
from importlib.util import find_spec
if {{'COLAB_RELEASE_TAG', 'KAGGLE_KERNEL_RUN_TYPE'}} & {{*os.environ}} and not find_spec('gpubench'):
    import subprocess, sys
    from importlib.metadata import version
    own = 'torch torchvision ipykernel jupyter_client traitlets'.split()
    kept = [f'{{o}}=={{version(o)}}' for o in own if find_spec(o)]
    print('Installing gpubench, which takes a minute or two. Kept unchanged:', ', '.join(kept))
    kit = 'gpubench-kit @ git+https://github.com/{repo}'
    if subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', kit, *kept]).returncode:
        raise RuntimeError('See the message from pip above. On Kaggle, turn on Internet access.')'''

def page_name(path): return path.relative_to(labs).with_suffix('').as_posix()    # '01_cpu_vs_gpu', 'deeper/02_crossover'

def badges(name):
    "One line: a badge that opens the lab on Colab, and one on Kaggle"
    page = f'github.com/{repo}/blob/main/nbs/labs/{name}.ipynb'
    colab = 'https://colab.research.google.com'
    return (f'[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/{page.replace(".com", "", 1)}) '
            f'[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://{page})')

def has_tag(cell, tag): return tag in cell.metadata.get('tags', [])

def with_badges(words, name):
    "The first cell's text with the badges below its title"
    title, _, rest = words.partition('\n')
    rest = re.sub(r'^\s*\[!\[Open in Colab\].*\n?', '', rest, flags=re.M).lstrip('\n')
    return f'{title}\n\n{badges(name)}\n\n{rest}'

def make_hosted(nb, name):
    "Add both to a notebook. The install cell comes after the parameters, because papermill puts its own there, and before any import"
    nb.cells[0].source = with_badges(nb.cells[0].source, name)
    cells = [o for o in nb.cells if not has_tag(o, 'install')]
    i = next(i for i,o in enumerate(cells) if has_tag(o, 'parameters'))+1
    old = next((o for o in nb.cells if has_tag(o, 'install')), None)
    cell = old or new_code_cell(id='install', metadata=dict(tags=['install']))
    cell.source = install
    nb.cells = [*cells[:i], cell, *cells[i:]]
    return nb

if __name__=='__main__':
    for path in sorted(labs.rglob('[0-9]*.ipynb')):
        nb = make_hosted(nbformat.read(path, 4), page_name(path))
        path.write_text(nbformat.writes(nb)+'\n', encoding='utf-8')
