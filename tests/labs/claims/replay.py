"What claims use: other values of a lab's variables for a while, and its cells once more"
import ast, re
from unittest.mock import patch

from IPython import get_ipython

def planted(**values):
    "Variables of the lab with other values within `with`; whatever is assigned there is gone afterwards"
    return patch.dict(get_ipython().user_ns, values)

def again(start, **edits):
    "Run the cell that has a line with this start once more, `name = None` in it edited; the value of its last line"
    known = get_ipython().user_ns
    [source] = {o for o in known['In'] if re.search(f'^{re.escape(start)}', o, re.M)}
    for k,v in edits.items(): source = re.sub(f'^{k} = None', lambda m: f'{k} = {v!r}', source, flags=re.M)
    *body, last = ast.parse(source).body
    shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shown else [*body, last], []), start, 'exec'), known)
    return eval(compile(ast.Expression(last.value), start, 'eval'), known) if shown else None
