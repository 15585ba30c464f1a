"""The files that whole_fit.py trains on, made once in fastai's cache: photographs in folders, scenes with masks,
tables, ratings and texts"""
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pandas as pd
from gpubench.ground.core import n_cores
from gpubench.data.made import make_once
from PIL import Image, ImageDraw

N_CLASSES = 10

def noise(rng, n_across, n_down, size, how):
    "Random colors on a grid of so many cells, enlarged to `size`"
    cells = rng.integers(0, 255, (n_down, n_across, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize(size, how)

def draw_photo(i, size=(500, 375), jitter=0):
    "Patches of color under fine grain; the class, `i%10`, decides how many, give or take `jitter` (a standard deviation)"
    rng = np.random.default_rng(i)
    n = 12+i%N_CLASSES+round(rng.normal(0, jitter))
    patches = noise(rng, n+4, n, size, Image.Resampling.BICUBIC)
    grain = noise(rng, size[0]//3, size[1]//3, size, Image.Resampling.BILINEAR)
    return Image.blend(patches, grain, .25)

def save_photo(folder, i, **kwargs): draw_photo(i, **kwargs).save(folder/f'c{i%N_CLASSES}'/f'{i}.jpg', quality=90)

def tags(i):
    "One to three words that fit the class, for labels of several"
    c = i%N_CLASSES
    return ' '.join(['few' if c<5 else 'many', *['odd']*(c%2), *['third']*(c%3==0)])

def write_photos(folder, n, **kwargs):
    for c in range(N_CLASSES): (folder/f'c{c}').mkdir()
    in_parallel(partial(save_photo, folder, **kwargs), n)
    rows = [dict(file=f'c{i%N_CLASSES}/{i}.jpg', tags=tags(i), patches=12.+i%N_CLASSES) for i in range(n)]
    write_csv(folder, rows)
    return n+1

SCENE_CODES = ['ground', 'sky', 'tree', 'car', 'person']
def save_scene(folder, i):
    "Ellipses of the codes on a photograph, and a mask that has each pixel's code"
    rng, picture = np.random.default_rng(i), draw_photo(i)
    mask = Image.new('L', picture.size)
    for code in rng.permutation(range(1, len(SCENE_CODES))):
        x, y, r = rng.uniform(0, picture.width), rng.uniform(0, picture.height), rng.uniform(40, 120)
        shape = Image.new('L', picture.size)
        ImageDraw.Draw(shape).ellipse((x-r, y-.7*r, x+r, y+.7*r), fill=255)
        texture = noise(rng, 8*code, 6*code, picture.size, Image.Resampling.NEAREST)
        picture.paste(Image.blend(picture, texture, .5), mask=shape)
        mask.paste(int(code), mask=shape)
    picture.save(folder/'images'/f'{i}.jpg', quality=90)
    mask.save(folder/'masks'/f'{i}.png')

def write_scenes(folder, n):
    for o in ('images', 'masks'): (folder/o).mkdir()
    in_parallel(partial(save_scene, folder), n)
    return 2*n

def write_table(folder, n):
    "As many columns as the Adult data set: eight of categories, six of numbers"
    rng = np.random.default_rng(0)
    df = pd.DataFrame({f'cat{i}': rng.integers(0, 3+5*i, n)
                       for i in range(8)} | {f'num{i}': rng.normal(size=n) for i in range(6)})
    score = df.num0*df.num1+(df.cat1%3)-(df.cat5%4)/2+rng.normal(size=n)
    return write_csv(folder, df.assign(rich=np.where(score>.5, 'yes', 'no')))

def write_ratings(folder, n):
    "As many users and films for each rating as MovieLens 100k"
    rng = np.random.default_rng(0)
    user, film = rng.integers(0, max(1, n//106), n), rng.integers(0, max(1, n//60), n)
    tastes, kinds = rng.normal(size=(user.max()+1, 3)), rng.normal(size=(film.max()+1, 3))
    rating = np.clip(np.round(3+(tastes[user]*kinds[film]).sum(1)+rng.normal(0, .5, n)), 1, 5)
    return write_csv(folder, dict(user=user, film=film, rating=rating))

def write_texts(folder, n):
    "Reviews of 50 to 400 words from 8,000, frequent ones first (Zipf); one word in 25 depends on the label"
    rng, rows = np.random.default_rng(0), []
    for i in range(n):
        words = rng.zipf(1.3, rng.integers(50, 400))%8000
        is_label = rng.random(len(words))<.04
        words[is_label] = 8000+2*rng.integers(0, 100, is_label.sum())+i%2
        rows.append(dict(text=' '.join(f'w{o}' for o in words), label=['neg', 'pos'][i%2]))
    return write_csv(folder, rows)

def write_csv(folder, rows):
    (folder/'csv').mkdir()
    pd.DataFrame(rows).to_csv(folder/'csv'/'all.csv', index=False)
    return 1

def in_parallel(f, n):
    with ProcessPoolExecutor(n_cores()) as pool: list(pool.map(f, range(n), chunksize=max(1, n//(8*n_cores()))))

WRITERS = dict(photos=write_photos, small_photos=partial(write_photos, size=(128, 128)),
               hard_photos=partial(write_photos, jitter=.5),
               scenes=write_scenes, table=write_table, ratings=write_ratings, texts=write_texts)

def make_files(kind, n):
    "The folder with `n` files, or rows of a table"
    return make_once(f'whole_fit_{kind}_{n}', lambda folder: dict(n_files=WRITERS[kind](folder, n)),
                     f'Making {n:,} {kind}, once.')
