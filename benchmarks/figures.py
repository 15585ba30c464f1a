"""What the benchmarks' figures share: bars that end at the median, every run a dot, the machine below"""
from statistics import median

import pandas as pd
from gpubench.show.plot import caption

def draw_bar(ax, at, values, color, text, height=.6, label=None):
    ax.barh(at, median(values), height=height, color=color, alpha=.35, label=label)
    ax.plot(values, [at]*len(values), 'o', color=color, alpha=.75, ms=5)
    ax.annotate(text, (max(values), at), (7, 0), va='center', textcoords='offset points')

def name_bars(ax, names):
    "Names at the bars, the first on top"
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names)-.5, -.5))
    ax.grid(False, axis='y')
    ax.tick_params(axis='y', length=0)

def finish(ax, title, machine, pad=6):
    "Title `pad` points above the axes, the machine below"
    ax.set_title(title, x=0, ha='left', pad=pad)
    words = caption(pd.DataFrame([dict(device='cuda') | machine]))
    ax.annotate(words, (0, 0), (0, -8), va='top', fontsize=9, textcoords='offset points',
                xycoords=('axes fraction', ax.xaxis.label))
