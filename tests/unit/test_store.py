"Decoded images outlive kills, full disks and other processes, and never return as a wrong pixel"
import os, random, shutil, signal, sqlite3, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import gpubench.data.store
from gpubench.data.store import ImageStore, stamp_of
from tests.helpers import root


def make_files(folder, n):
    "Made-up files that were last changed in 1970"
    folder.mkdir(exist_ok=True)
    files = [folder/f'{i}.jpg' for i in range(n)]
    for o in files:
        o.write_bytes(b'jpeg')
        os.utime(o, ns=(0, 10**9))
    return files

def pixels_of(file, n_bytes=60_000):
    "Each file's own, so that no mix-up goes unnoticed"
    return np.random.default_rng(int(file.stem)).integers(0, 256, n_bytes, dtype=np.uint8).reshape(100, -1, 3)

def keep(store, files):
    for o in files: store.put(o, stamp_of(o), pixels_of(o))
    store.flush()

def n_right(store, files):
    "How many of these files' pixels are here, none of which is wrong"
    found = {o: store.get(o) for o in files}
    found = {o: a for o,a in found.items() if a is not None}
    for o,a in found.items(): assert np.array_equal(a, pixels_of(o)), o
    return len(found)

def open_store(folder): return ImageStore(folder, 'decoded', min_free_mib=0)

def start(code, *args):
    "A process that runs `code` after this module's definitions"
    code = f'import sys; from pathlib import Path; from tests.unit.test_store import *\n{code}'
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], cwd=root, env=os.environ | dict(PYTHONPATH=str(root)),
                            stdout=subprocess.PIPE, text=True)

@pytest.fixture
def files(tmp_path): return make_files(tmp_path/'photos', 40)

@pytest.fixture
def folder(tmp_path, files):
    "A cache that holds the first 20 files"
    with open_store(tmp_path/'cache') as store: keep(store, files[:20])
    return tmp_path/'cache'

def file_in(folder):
    found, = folder.glob('*.sqlite')
    return found


# ---- kills, and several processes

putting = '''
with open_store(Path(sys.argv[1])) as store:
    files = [Path(o) for o in sys.argv[2:]]
    print('ready', flush=True)
    for _ in range({rounds}):
        for o in files: keep(store, [o])
    print(store.why_full, n_right(store, files), flush=True)
'''

@pytest.mark.slow
def test_killed_while_writing(tmp_path, files):
    for i in range(3):
        process = start(putting.format(rounds=10**6), tmp_path/'cache', *files)
        process.stdout.readline()
        time.sleep(.02+.05*random.random())
        process.kill()
        process.wait()
        with open_store(tmp_path/'cache') as store:
            assert store.why_full is None
            n = n_right(store, files)
    with closing(sqlite3.connect(file_in(tmp_path/'cache'))) as db:
        assert db.execute('pragma integrity_check').fetchall()==[('ok',)]
    assert n>0

def size_of(store): # in bytes, with what its log has
    [(size,)] = store._read('select page_count*page_size from pragma_page_count, pragma_page_size')
    return size

@pytest.mark.slow
def test_two_processes_write_while_a_third_reads(tmp_path, files):
    processes = [start(putting.format(rounds=2), tmp_path/'cache', *files) for _ in range(2)]
    for o in processes: o.stdout.readline()
    with open_store(tmp_path/'cache') as store:
        while any(o.poll() is None for o in processes): n_right(store, files[:5])
        assert [o.stdout.read().strip() for o in processes]==[f'None {len(files)}']*2
        assert n_right(store, files)==len(files) and store.why_full is None
        assert size_of(store) < 1.2*sum(pixels_of(o).nbytes for o in files)          # each once

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_a_forked_process_has_its_own_connection(folder, files):
    with open_store(folder) as store, ThreadPoolExecutor(4) as ex:
        jobs = [ex.submit(keep, store, files[20:30]) for _ in range(8)]           # transactions while it forks
        pids = []
        for o in files[30:]:
            pids.append(os.fork())
            if pids[-1]==0:
                signal.alarm(30)                                  # rather than wait for a lock forever
                try:
                    keep(store, [o])
                    store.close()
                    os._exit(n_right(open_store(folder), files[:20])!=20)
                finally: os._exit(2)
        assert [os.waitstatus_to_exitcode(os.waitpid(o, 0)[1]) for o in pids]==[0]*10
        for o in jobs: o.result()
        assert n_right(store, files)==40 and store.why_full is None

def test_a_closed_store_stays_closed(folder, files):
    store = open_store(folder)
    store.close()
    keep(store, files[20:])
    assert n_right(store, files)==0 and store.why_full is None
    store.close()
    with open_store(folder) as store: assert n_right(store, files)==20

def test_threads_put_and_get_at_once(tmp_path, files):
    with open_store(tmp_path/'cache') as store, ThreadPoolExecutor(16) as ex:
        def work(i):
            mine = random.Random(i).sample(files, len(files))
            keep(store, mine)
            return n_right(store, mine)
        assert [*ex.map(work, range(16))]==[len(files)]*16

def test_locked_by_another_program(folder, files, monkeypatch):
    monkeypatch.setattr(gpubench.data.store, 'LOCK_S', .05)
    with open_store(folder) as store, closing(sqlite3.connect(file_in(folder), isolation_level=None)) as other:
        other.execute('begin exclusive')
        keep(store, files[20:])
        assert 'locked' in store.why_full and 'Another program' in store.why_full
        n_right(store, files[:1])
        other.execute('rollback')
        assert n_right(store, files)==0                           # once is enough: no 30 s for each image
    with open_store(folder) as store: assert n_right(store, files)==20


# ---- damage

def test_damaged_bytes(folder, files):
    "Wherever a byte flips, pixels are right, or aren't there"
    whole, rng, lost = file_in(folder).read_bytes(), random.Random(0), 0
    for _ in range(40):
        damaged = bytearray(whole)
        for _ in range(4): damaged[rng.randrange(len(whole))] ^= 1<<rng.randrange(8)
        file_in(folder).write_bytes(damaged)
        with open_store(folder) as store: lost += n_right(store, files)<20
    assert lost>30

@pytest.mark.parametrize('share', [.001, .3, .7, .999])
def test_cut_file(folder, files, share):
    os.truncate(file_in(folder), int(share*file_in(folder).stat().st_size))
    with open_store(folder) as store:
        keep(store, files)
        assert n_right(store, files)<20 and 'Delete the file' in store.why_full
    file_in(folder).unlink()                                      # as it says
    with open_store(folder) as store:
        keep(store, files)
        assert n_right(store, files)==40 and store.why_full is None

def test_cut_while_open(folder, files):
    with open_store(folder) as store:
        n_right(store, files[:2])
        os.truncate(file_in(folder), file_in(folder).stat().st_size//2)
        n_right(store, files)
        keep(store, files)
        n_right(store, files)

def test_swapped_pixels_are_found_and_put_again(folder, files):
    with closing(sqlite3.connect(file_in(folder))) as db, db:
        a, b, c = db.execute('select rowid, checksum, pixels from images limit 3').fetchall()
        changes = [(*b[1:], a[0]), (*a[1:], b[0]), (0, None, c[0])]
        db.executemany('update images set checksum=?, pixels=? where rowid=?', changes)
    with open_store(folder) as store:
        assert n_right(store, files)==17
        keep(store, files[:20])
        assert n_right(store, files)==20

def test_another_format_is_another_file(tmp_path, files, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(gpubench.data.store, 'FORMAT', 0)
        with open_store(tmp_path/'cache') as store: keep(store, files)
    with open_store(tmp_path/'cache') as store:
        assert n_right(store, files)==0
        keep(store, files)
        assert n_right(store, files)==40
    assert len([*(tmp_path/'cache').glob('*.sqlite')])==2


# ---- disks and permissions

@contextmanager
def largest_file(n_bytes):
    "As on a disk that is full: no file of this process may grow beyond this"
    resource = pytest.importorskip('resource')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

def test_disk_becomes_full(folder, files):
    with open_store(folder) as store:
        with largest_file(size_of(store)+300_000):
            keep(store, files[20:22])
            assert store.why_full is None
            keep(store, files[22:])
        assert 'keeps no more' in store.why_full and 'quota' in store.why_full
        assert n_right(store, files)==22
        keep(store, files[22:])                                   # it doesn't try again
        assert n_right(store, files)==22
    with open_store(folder) as store:
        keep(store, files)
        assert n_right(store, files)==40 and store.why_full is None

def test_disk_is_full(tmp_path, files):
    with largest_file(0), open_store(tmp_path/'cache') as store:
        keep(store, files)
        assert 'keeps no more' in store.why_full and n_right(store, files)==0
    with open_store(tmp_path/'cache') as store:                   # an empty file was left
        keep(store, files)
        assert n_right(store, files)==40

@contextmanager
def read_only(folder):
    "The folder and what is in it, for this user, who isn't root meanwhile"
    if os.name=='nt': pytest.skip("Windows' folders have no such mode")
    was_root = os.geteuid()==0
    for o in (*folder.iterdir(), folder): o.chmod(0o555 if o.is_dir() else 0o444)
    if was_root: os.seteuid(65534)
    try: yield
    finally:
        if was_root: os.seteuid(0)
        for o in (folder, *folder.iterdir()): o.chmod(0o755 if o.is_dir() else 0o644)

@pytest.fixture
def open_to_all():
    "A folder that any user can reach, which pytest's own can't be"
    with TemporaryDirectory() as d:
        Path(d).chmod(0o755)
        yield Path(d)

def test_read_only_folder(open_to_all):
    files = make_files(open_to_all/'photos', 4)
    with open_store(open_to_all/'cache') as store: keep(store, files[:2])
    with read_only(open_to_all/'cache'), open_store(open_to_all/'cache') as store:
        assert 'keeps no more' in store.why_full and 'writable' in store.why_full
        keep(store, files)
        assert n_right(store, files)==2

def test_read_only_folder_without_a_cache(open_to_all):
    (open_to_all/'cache').mkdir()
    with read_only(open_to_all/'cache'), pytest.raises(RuntimeError, match="Can't open.*choose another folder"):
        open_store(open_to_all/'cache')

def test_folder_deleted_while_open(folder, files):
    with open_store(folder) as store:
        try: shutil.rmtree(folder)
        except PermissionError: pytest.skip('Windows keeps open files')
        keep(store, files[20:])
        assert 'keeps no more' in store.why_full and n_right(store, files)==20     # the open file is still there

def test_a_file_that_is_deleted_or_replaced(folder, files):
    with open_store(folder) as store:
        files[0].unlink()
        os.utime(files[1], ns=(0, 3*10**9))                       # the same size
        assert [store.get(o) for o in files[:2]]==[None, None] and n_right(store, files)==18

@pytest.mark.skipif(sys.platform!='linux', reason='elsewhere, names are Unicode')
def test_odd_names_and_times(tmp_path):
    photos = make_files(tmp_path/'photos', 3)
    odd = [photos[0].rename(tmp_path/'photos'/os.fsdecode(b'\xff.jpg')), photos[1].rename(tmp_path/"photos/a'b\n?.jpg"), photos[2]]
    os.utime(odd[2], (0, 10**10))                                 # the year 2286, beyond 64 bits of ns
    with open_store(tmp_path/'cache') as store:
        for i,o in enumerate(odd): store.put(o, stamp_of(o), np.full((1, 1), i, np.uint8))
        store.flush()
        assert [a if a is None else a.item() for a in map(store.get, odd)]==[0, 1, None] and store.why_full is None

def test_arrays_of_any_shape_and_layout(tmp_path, files):
    arrays = [np.zeros((0, 5, 3), np.uint8), np.arange(24, dtype=np.uint8).reshape(2, 4, 3).transpose(1, 0, 2), np.ones((3, 4), np.uint8)]
    with open_store(tmp_path/'cache') as store:
        for o,a in zip(files, arrays): store.put(o, stamp_of(o), a)
        store.flush()
        for o,a in zip(files, arrays): np.testing.assert_array_equal(store.get(o), a, strict=True)
