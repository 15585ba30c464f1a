"""Makes the virtual environment that a `make` target needs, or finds in a moment that it is ready

    set_up.py plain|lab|int8|dev [--venv .venv]                 the library with no extra, with `lab`, with `lab` and `int8`, with `dev`
    set_up.py newest [--venv .venv-newest] [--base .venv]       the newest fastai over the torch of another environment

A stamp is written last and taken away first. So an environment whose set-up failed or was interrupted has none, and the
next call starts it over. The library is installed as editable: after `git pull` the environment serves the new code."""
import argparse, errno, fcntl, hashlib, json, os, shlex, shutil, subprocess, sys
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path

root = Path(__file__).resolve().parent.parent
extras = ['plain', 'lab', 'int8', 'dev', 'newest']  # of the first four, each holds what those before it hold
pip_extras = dict(plain='', int8='[lab,int8]')      # what pip is asked for; the others go by their own names
sources = ['settings.ini', 'setup.py', 'pyproject.toml']
stamp_name = 'gpubench-stamp.json'
low_disk_gib = 8                                    # torch with its CUDA libraries takes about 6
image_extra = 'dev'                                 # a container image has it all, but
image_lacks = ['playwright']                        # 165 MB for tests in a browser, which it does not have; they are skipped
image_keys = ['image_torch', 'requirements', 'lab_requirements', 'int8_requirements', 'dev_requirements']   # what `dev` holds, torch first
rebuild = ("The container's image was built for other requirements than those of this checkout. Build it again: «Dev Containers: "
           "Rebuild Container» in VS Code, or `docker compose -f docker-compose.cpu.yml build` (gpu.yml for a GPU) on the host.")


def setting(key):
    "What `settings.ini` says for `key`"
    parser = ConfigParser(delimiters=['='], interpolation=None)
    parser.read(root/'settings.ini', encoding='utf-8')
    return parser['DEFAULT'][key]

def digest(*parts): return hashlib.sha256(b'\0'.join(parts)).hexdigest()[:16]

def image_requirements():
    "What is installed into an image"
    wanted = [o for k in image_keys for o in shlex.split(setting(k), comments=True)]
    return [o for o in wanted if not o.startswith(tuple(image_lacks))]

def wanted_sources(image, base=None):
    "One hash over what an environment was made from; contents, since a clone or a checkout gives every file a new time"
    if image: return digest('\n'.join(image_requirements()).encode(), (root/'tools'/'image_constraints.txt').read_bytes())
    return digest(*(o.read_bytes() for o in [*(root/o for o in sources), *([base/stamp_name] if base else [])]))

def read_stamp(venv):
    "What the last complete set-up of `venv` wrote; empty if there was none"
    try: return json.loads((venv/stamp_name).read_text())
    except (OSError, ValueError): return {}

def runs(venv, version):
    "Whether the environment's own Python runs, is of `version`, and sees pip and the library"
    code = ("import sys; from importlib.metadata import version as v; v('pip'); v('gpubench'); "
            "print('%d.%d' % sys.version_info[:2])")
    try: res = subprocess.run([venv/'bin'/'python', '-c', code], cwd='/', capture_output=True, text=True)
    except OSError: return False                    # half made, or its Python was removed
    return res.returncode==0 and res.stdout.strip()==version

def state(venv, extra, wanted):
    "'ready', 'stale' (complete, but made for something else) or 'broken'"
    stamp = read_stamp(venv)
    if stamp.get('venv')!=str(venv): return 'broken'   # moved: its scripts name the folder that they were made in
    if not runs(venv, stamp['python']): return 'broken'
    if os.environ.get('PYTHON') and stamp['python']!=wanted['python']: return 'broken'  # another one was asked for by name
    enough = extras.index(stamp['extra']) >= extras.index(extra)
    return 'ready' if enough and stamp['sources']==wanted['sources'] else 'stale'

def run(*cmd):
    "Run `cmd` in the checkout; where it fails, leave with a sentence"
    cmd = [str(o) for o in cmd]
    env = {**os.environ, 'PIP_USER': '0', 'PIP_DISABLE_PIP_VERSION_CHECK': '1'}  # some hosts set PIP_USER, which no venv allows
    if code := subprocess.run(cmd, cwd=root, env=env).returncode:
        sys.exit(f"\nThe set-up failed: `{shlex.join(cmd)}` ended with {code}; the lines above say why. "
                 "Once that is mended, the same make command starts it over.")

@contextmanager
def only_one(venv):
    "Let a second set-up of the same environment wait for the first"
    with open(f'{venv}.lock', 'w') as f:
        try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f'Another set-up of {venv.name} is under way; waiting for it.', flush=True)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield

def make_venv(venv):
    "An empty environment in place of whatever lies there"
    free_gib = shutil.disk_usage(venv.parent).free/2**30
    if free_gib < low_disk_gib: print(f'Only {free_gib:.1f} GiB are free here; a full set-up takes about 6.', flush=True)
    run(getattr(sys, '_base_executable', sys.executable), '-m', 'venv', '--clear', venv)

def pip(venv, *args):
    "Install by the environment's own pip"
    run(venv/'bin'/'python', '-m', 'pip', 'install', *args)

def pip_install(venv, extra):
    "The library as editable, with `extra`"
    pip(venv, '-e', '.'+pip_extras.get(extra, f'[{extra}]'))

def ask(venv, expression):
    "What the environment's Python prints for `expression`"
    code = f'import sysconfig; from importlib.metadata import version; print({expression})'
    res = subprocess.run([venv/'bin'/'python', '-c', code], capture_output=True, text=True)
    if res.returncode: sys.exit(f'{venv.name} cannot be read:\n{res.stderr}')
    return res.stdout.strip()

def pip_install_newest(venv, base):
    "The newest fastai and its own family; everything else, torch above all, is read from `base`"
    site = "sysconfig.get_path('purelib')"
    paths = f'{ask(base, site)}\n{root}\n'            # Python puts them after the environment's own packages
    Path(ask(venv, site), 'gpubench-base.pth').write_text(paths)
    constraints = venv/'constraints.txt'
    constraints.write_text('\n'.join(f'{o}=={ask(base, f"version({o!r})")}' for o in ('torch', 'torchvision')))
    print(f"pip will name conflicts of nbdev's requirements, which it sees in {base.name}; no test here uses nbdev.", flush=True)
    pip(venv, '--upgrade', '-c', constraints, *shlex.split(setting('newest_requirements')))

def wanted_stamp(venv, extra, base=None, image=False):
    "What the stamp of `venv` says once it serves `extra`"
    return dict(venv=str(venv), extra=extra, python='%d.%d' % sys.version_info[:2], sources=wanted_sources(image, base))

def set_up(venv, extra, base=None):
    "Bring `venv` to a state that serves `extra`"
    image = read_stamp(venv).get('image', False)
    wanted = wanted_stamp(venv, extra, base, image)
    if state(venv, extra, wanted)=='ready': return
    if image: sys.exit(rebuild)
    with only_one(venv):
        found = state(venv, extra, wanted)          # again: another set-up may just have ended
        if found=='ready': return
        old = read_stamp(venv)
        if found=='stale' and not base:             # keep what is there and what it was made for
            wanted.update(python=old['python'], extra=max(extra, old['extra'], key=extras.index))
            print(f'Bringing {venv.name} up to date.', flush=True)
        elif venv.exists(): print(f'{venv.name} is interrupted, moved or outdated; starting it over.', flush=True)
        else: print(f'Setting up {venv.name} with Python {sys.version.split()[0]}, once'
                    + ('.' if base else ': a few minutes, about 6 GB.'), flush=True)
        (venv/stamp_name).unlink(missing_ok=True)
        if found=='broken' or base: make_venv(venv)
        if base: pip_install_newest(venv, base)
        else: pip_install(venv, wanted['extra'])
        draft = venv/f'{stamp_name}.draft'
        draft.write_text(json.dumps(wanted))
        draft.replace(venv/stamp_name)              # whole or not at all

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('extra', choices=extras)
    parser.add_argument('--venv', type=Path, help='the environment to make')
    parser.add_argument('--base', type=Path, default='.venv', help='for `newest`: whose torch to use')
    args = parser.parse_args()
    newest = args.extra=='newest'
    venv = root/(args.venv or ('.venv-newest' if newest else '.venv'))
    base = root/args.base if newest else None
    if base and not read_stamp(base): sys.exit(f'{base} is not ready; run `set_up.py dev` first.')
    try: set_up(venv, args.extra, base)
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS): raise
        sys.exit(f'{e.filename} may not be written by this user. Name a folder of your own: VENV=/path/to/it')
    except KeyboardInterrupt: sys.exit('\nInterrupted. The next make command starts the set-up over.')

if __name__=='__main__': main()
